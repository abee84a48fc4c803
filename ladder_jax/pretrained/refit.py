"""Fit the projections of converted sublayers again, in closed form, to the inputs that they now
have.

A converted sublayer was trained to read n(x), the normalised stream, and now reads n(z), where z
lacks the newest outputs. Those are largely predictable from z. So for each sublayer, in the order
of the forward pass and behind the sublayers that are fitted already, one matrix M is fitted by
ridge regression on a calibration text (sums over tokens):

    M = argmin |n(z) M - n(x)|^2 + l |M - 1|^2 = 1 + (G + l 1)^-1 C,
    G = n(z)^T n(z),  C = n(z)^T (n(x) - n(z))

n is the normalisation without its gain g, and l = ridge * trace(G) / D. M becomes part of the
projections that read the input (query, key, value; gate, up; of experts the router, every expert's
gate and up, and the shared one's gate, up and share): W <- M diag(g) W, and the gain becomes 1. So
the model has the same parameters and the same program. Nothing is trained, and biases and the other
parameters stay.

Then, if that is requested, the output projection W: with h what it reads now, and y the output that
the sublayer as it was gives of the whole input, it becomes W + X,

    X = argmin |h (W + X) - y|^2 + l |X|^2 = (G + l 1)^-1 C,  G = h^T h,  C = h^T (y - h W)

with l = ridge * trace(G) / M. Both are one problem: what h has to add to give what is lacking.
sublayers.py has the forward pass and its sums over tokens.
"""

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ladder_jax import files, nn, parallel
from ladder_jax.config import ModelConfig, to_dict
from ladder_jax.config.fields import check
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.nn.parameter import stack_of
from ladder_jax.pretrained.source import Arrays, Key, Source, Stored, load_layer
from ladder_jax.pretrained.sublayers import Streams, batches, delays, programs
from ladder_jax.terminal import progress

__all__ = ["Fit", "FittedProjections", "Refit", "Refitted", "refit"]

SUBLAYERS = ("attention", "mlp")
"""The names of a layer's two sublayers, in their order."""
EXPERTS = {
    "router": 1,
    "experts/gate": 0,
    "experts/up": 0,
    "shared/gate": 1,
    "shared/up": 1,
    "shared/share": 0,
}
READERS = {"attention": {"query": 1, "key": 1, "value": 1}, "mlp": {"gate": 1, "up": 1, **EXPERTS}}
"""The arrays that may read a sublayer's input, and the dimension of each that tensor parallelism
splits (where it splits none, any).
"""
WRITERS = {"attention": "out", "mlp": "down"}
"""The output projections; those of experts stay."""


class FittedProjections(enum.Enum):
    """Which projections of a sublayer are fitted."""

    NONE = "none"
    INPUTS = "inputs"  # those that read its input
    BOTH = "both"  # and its output projection


@dataclasses.dataclass(frozen=True)
class Refit:
    """ridge: the weight of |M - 1|^2, relative to the mean square of an input's component.

    alone: each layer is fitted as if it were the only converted one, for a measurement of each;
    else behind the layers that are fitted already.
    """

    ridge: float = 1e-3
    projections: FittedProjections = FittedProjections.INPUTS
    alone: bool = False

    def __post_init__(self):
        if not 0 < self.ridge < float("inf"):
            raise UserError(f"the ridge must be a positive number, not {self.ridge:g}")


@dataclasses.dataclass(frozen=True)
class Fit:
    """One fitted sublayer, "attention" or "mlp". The mean square of what its input lacks of the
    whole one's, relative to the latter's: as it reads the late input, and after the fit, both on
    the calibration text.

    Or its output projection, "attention/out" or "mlp/down": the same of its output, behind the
    fitted input.
    """

    layer: int
    sublayer: str
    before: float
    after: float


# fitted arrays in the source's dtypes, and the shares before and after of Fit
Computed = tuple[dict[Key, np.ndarray], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Refitted:
    """source: the model with the fitted arrays. fits: in the order of the forward pass."""

    source: Source
    fits: tuple[Fit, ...]


def refit(
    source: Source,
    *,
    model: ModelConfig,
    rows: np.ndarray,
    mesh: jax.sharding.Mesh,
    settings: Refit = Refit(),
    folder: pathlib.Path | None = None,
) -> Refitted:
    """`source` with the projections fitted that read the inputs of `model`'s converted layers.

    model: the converted one, `source.model` but for its ladder layers. rows: the calibration text's
        tokens [n, T].
    mesh: the axes data, which divides n, and tensor; of the weights one layer's are on the devices,
        of the statistics one sublayer's. The streams of all tokens stay on the host, (1 + delay) n T D values.
    folder: keeps the results of each sublayer; called again with equal arguments, `refit` reads
    them and goes on. Raises UserError for fewer tokens than the model's width, a source that is not
    standard, or a mesh that does not suit, and RunFailed where the activations are not finite.
    """
    if rows.size < model.d_model:
        raise UserError(
            f"a refit needs at least as many tokens of calibration text as the model's width, {model.d_model};"
            f" there are {rows.size}"
        )
    if source.model.residual != "standard":
        raise UserError(
            f"a refit starts from a standard model; {source.path!r} is {source.model.residual}"
        )
    definition = nn.define(parallel.with_ranks(model, tensor=mesh.shape["tensor"]), mesh=mesh)
    split = definition.layout.batch_ranks
    check(definition.layout.fsdp == 1, "refit runs on a mesh of data and tensor: mesh.fsdp=1")
    check(
        len(rows) % split == 0, f"{len(rows)} rows of text cannot be split over {split} data ranks"
    )
    request = ""
    if folder:
        request = _request(source, model, rows, mesh, settings)
    passes = Pass(definition, source, rows)
    fits_inputs = settings.projections is not FittedProjections.NONE
    fits_outputs = settings.projections is FittedProjections.BOTH
    fits = []

    def fit(layer: int, index: int, name: str, computed: Callable[..., Computed]) -> None:
        compute = functools.partial(computed, passes, layer, index, ridge=settings.ridge)
        if folder:
            fitted = name.replace("/", "-")
            stored, shares = _kept(folder / f"{request}-{layer:04d}-{fitted}.npz", compute)
        else:
            arrays, shares = compute()
            stored = {key: in_memory(array) for key, array in arrays.items()}
        passes.replace(stored)
        fits.append(Fit(layer, name, *shares))

    with progress(2 * model.num_layers, label="refitted {done}/{total} sublayers") as update:
        for layer in range(model.num_layers):
            entering = passes.streams
            for index, name in enumerate(SUBLAYERS):
                output = f"{name}/{WRITERS[name]}"
                if fits_inputs and passes.late(layer, index):
                    fit(layer, index, name, fitted_inputs)
                    if fits_outputs and passes.key(layer, output) in source.arrays:
                        fit(layer, index, output, fitted_output)
                passes.advance(layer, index)
                update(2 * layer + index + 1, "")
            if settings.alone:
                passes.streams = entering
                for index in (0, 1):
                    passes.advance(layer, index, original=True)
    return Refitted(passes.source, tuple(fits))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over tokens, in float64 on the host, of what a projection reads, h, and of what its
    output lacks, t.

    Each batch is summed in float32 on the devices: an entry errs by at most n u sum |a| |b|, with n
    tokens a batch and u = 2^-24 (about sqrt(n) u of it, where the roundings' signs are random),
    however many batches there are.

    products: h^T [h, t], [R, M, M + D], with R the number of ranks with inputs of their own, or 1.
    energy: of what is to be reached. missing: [ranks], of t.
    """

    products: np.ndarray
    energy: float
    missing: np.ndarray

    @classmethod
    def of(cls, batches: Iterable[Sequence[jax.Array]], *, width: int) -> "Statistics":
        """The sums of the batches' sums (products, energy, missing). width: D."""
        total = None
        for sums in map(jax.device_get, batches):
            if total is None:
                total = [np.array(one, np.float64) for one in sums]
            else:  # in place: of a large model they have gigabytes
                for whole, one in zip(total, sums):
                    np.add(whole, one, out=whole)
        products, energy, missing = total
        return cls(products[:, : products.shape[2] - width], float(energy), missing)

    def changes(self, parts: int, *, ridge: float) -> list[np.ndarray]:
        """X = argmin |h X - t|^2 + l |X|^2, [M, D], for each of `parts` equal groups of ranks; one
        for all where all have the same input.
        """
        groups = np.split(self.products, min(parts, len(self.products)))
        return [solve(functools.reduce(np.add, group), ridge=ridge) for group in groups]

    def shares_missing(self, changes: list[np.ndarray]) -> tuple[float, float]:
        """The mean of |t|^2 over the energy, and with each rank's X that of |t - h X|^2."""
        gained = []
        for products, change in zip(self.products, changes, strict=True):
            gram, cross = np.split(products, [len(products)], axis=1)
            gain = change * (2 * cross - gram @ change)
            gained.append(np.sum(gain))
        missing = np.mean(self.missing)
        left = missing - np.mean(gained)
        energy = self.energy or 1.0  # a sublayer that gives nothing misses nothing
        return float(missing / energy), float(left / energy)


def solve(products: np.ndarray, *, ridge: float) -> np.ndarray:
    """(G + l 1)^-1 C of `products` [M, M + D] = (G, C), with l = `ridge` * trace(G) / M.

    Raises RunFailed.
    """
    import scipy.linalg  # slow to import

    parts = np.split(products, [len(products)], axis=1)
    gram, cross = (np.array(part, order="F") for part in parts)  # which LAPACK overwrites
    level = ridge * np.trace(gram) / len(gram)
    if level == 0:  # the projection reads nothing but zeros
        return np.zeros_like(cross)
    gram[np.diag_indices_from(gram)] += level
    try:
        return scipy.linalg.solve(gram, cross, assume_a="pos", overwrite_a=True, overwrite_b=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: not finite
        raise RunFailed(
            f"no least squares: {error} (too small a ridge, {ridge:g}, or infinite activations)"
        ) from None


def folded(
    weight: np.ndarray, gain: np.ndarray, changes: list[np.ndarray], *, axis: int
) -> np.ndarray:
    """(1 + X) diag(`gain`) `weight` [D, ...] in the weight's dtype, with X from `changes`. With
    several X, each is of an equal part along `axis`.
    """
    gain = gain.astype(np.float64)[:, None]
    products = []
    parts = np.split(weight.astype(np.float64), len(changes), axis=axis)
    for change, part in zip(changes, parts, strict=True):
        gained = gain * part.reshape(len(part), -1)
        product = gained + change @ gained
        products.append(product.reshape(part.shape))
    return np.concatenate(products, axis=axis).astype(weight.dtype)


class Pass:
    """The forward pass of a model on the calibration text, sublayer by sublayer.

    source: the model's arrays, which `replace` replaces. streams: of each batch, on the host.
    """

    def __init__(self, definition: nn.ModelDef, source: Source, rows: np.ndarray):
        self.definition = definition
        self.original = source
        self.source = dataclasses.replace(source, model=definition.config)
        self._programs = programs(definition)
        self._delays = delays(definition.config)
        # a layer's arrays on the devices, fitted and as they were
        newest = functools.lru_cache(maxsize=1)
        self._fitted = newest(lambda layer: load_layer(self.source, definition, layer))
        self._unfitted = newest(lambda layer: load_layer(source, definition, layer))
        embedding = load_layer(source, definition, None)["embedding"]
        self.streams = [
            jax.device_get(self._programs.begin(embedding, self._place(tokens, "BT")))
            for tokens in batches(rows, multiple=definition.layout.batch_ranks)
        ]

    def key(self, layer: int, array: str) -> Key:
        return Key.of_layer(layer, array, model=self.original.model)

    def late(self, layer: int, index: int) -> bool:
        """Whether the sublayer's input lacks some output; the model's first sublayers have none to
        lack.
        """
        return min(self._delays[layer, index], 2 * layer + index) > 0

    def replace(self, arrays: Arrays) -> None:
        self.source = dataclasses.replace(self.source, arrays={**self.source.arrays, **arrays})
        self._fitted.cache_clear()

    def advance(self, layer: int, index: int, *, original: bool = False) -> None:
        """All batches through one sublayer. original: as the standard model computes it, from
        `original`'s arrays.
        """
        run = self._programs.advance[self._stack(layer)][index]
        if original:
            delay = np.int32(0)
            params = self._unfitted(layer)
        else:
            delay = self._delays[layer, index]
            params = self._fitted(layer)
        self.streams = [jax.device_get(run(params, one, delay)) for one in self._placed()]

    def statistics(self, layer: int, index: int) -> Statistics:
        """Of the sublayer's late input, and its whole one."""
        return self._summed(self._programs.statistics, layer, index)

    def output_statistics(self, layer: int, index: int) -> Statistics:
        """Of the sublayer's output, and the one that `original`'s arrays give of the whole
        input.
        """
        run = self._programs.output_statistics[self._stack(layer)][index]
        run = functools.partial(run, self._fitted(layer), self._unfitted(layer))
        return self._summed(run, layer, index)

    def _summed(self, run: Callable, layer: int, index: int) -> Statistics:
        sums = (run(streams, self._delays[layer, index]) for streams in self._placed())
        return Statistics.of(sums, width=self.definition.config.d_model)

    def _stack(self, layer: int) -> str:
        return stack_of(self.definition.config, layer)[0]

    def _placed(self) -> Iterator[Streams]:
        """The batches' streams on the devices, one batch at a time."""
        return (self._place(streams, self._programs.dims) for streams in self.streams)

    def _place(self, tree: Any, dims: Any) -> Any:
        return jax.tree.map(
            lambda a, d: jax.device_put(a, self.definition.layout.sharding(d)), tree, dims
        )


def fitted_inputs(passes: Pass, layer: int, index: int, *, ridge: float) -> Computed:
    """A sublayer's fitted projections, and its gain of ones."""
    statistics = passes.statistics(layer, index)
    name = SUBLAYERS[index]
    solved = {}
    original = passes.original.arrays
    norm = passes.key(layer, f"{name}_norm/scale")
    gain = original[norm].read()
    arrays = {norm: np.ones_like(gain)}
    for reads, axis in READERS[name].items():
        key = passes.key(layer, f"{name}/{reads}")
        if key not in original:
            continue
        weight = original[key].read()
        # Where several ranks share a key/value head, they share its fit.
        parts = min(len(statistics.products), weight.shape[axis])
        if parts not in solved:
            solved[parts] = statistics.changes(parts, ridge=ridge)
        if reads.startswith("experts/"):  # in float64 one at a time
            arrays[key] = np.stack(
                [folded(expert, gain, solved[parts], axis=1) for expert in weight]
            )
        else:
            arrays[key] = folded(weight, gain, solved[parts], axis=axis)
    return arrays, statistics.shares_missing(solved[max(solved)])


def fitted_output(passes: Pass, layer: int, index: int, *, ridge: float) -> Computed:
    """The sublayer's output projection, behind its fitted inputs."""
    statistics = passes.output_statistics(layer, index)
    name = SUBLAYERS[index]
    key = passes.key(layer, f"{name}/{WRITERS[name]}")
    weight = passes.original.arrays[key].read()
    (change,) = statistics.changes(1, ridge=ridge)
    fitted = weight.astype(np.float64) + change.reshape(weight.shape)
    arrays = {key: fitted.astype(weight.dtype)}
    return arrays, statistics.shares_missing([change])


def in_memory(array: np.ndarray) -> Stored:
    return Stored(array.shape, array.dtype, lambda: array)


def _request(
    source: Source, model: ModelConfig, rows: np.ndarray, mesh: jax.sharding.Mesh, settings: Refit
) -> str:
    """A digest of what the fitted arrays depend on."""
    found = []
    # without dotted names: a conversion into the source's own folder keeps what is fitted there
    for file in files.below(pathlib.Path(source.path).resolve(), data=True):
        stat = file.stat()
        found.append([str(file), stat.st_size, stat.st_mtime_ns])
    return files.digest(
        found,
        [to_dict(model), dict(mesh.shape), rows.tolist()],
        [settings.ridge, settings.projections.value, settings.alone],
    )


def _kept(
    file: pathlib.Path, compute: Callable[[], Computed]
) -> tuple[Arrays, tuple[float, float]]:
    """What `compute` returns, from the file of an interrupted run, if it is there; the file is
    written if not. The arrays are read from it when they are asked for, so that the host holds one
    at a time.
    """
    if not file.exists():
        arrays, shares = compute()
        # of bfloat16, NumPy keeps the bytes alone
        named = {f"{key.name} {key.layer} {array.dtype}": array for key, array in arrays.items()}
        file.parent.mkdir(exist_ok=True)
        files.write_atomically(str(file), lambda path: np.savez(path, shares=shares, **named))

    def array(name: str) -> np.ndarray:
        with np.load(file) as content:
            return content[name].view(name.split()[2])

    found = {}
    with np.load(file) as content:
        shares = content["shares"].tolist()
        _, *names = content.files  # the shares come first
    for name in names:
        array_name, layer, dtype = name.split()
        shape = array(name).shape
        read = functools.partial(array, name)
        found[Key(array_name, int(layer))] = Stored(shape, np.dtype(dtype), read)
    return found, tuple(shares)
