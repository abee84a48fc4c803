"""Fit the projections of converted sublayers again, in closed form, to the inputs that they now
have.

A converted sublayer was trained to read n(x), the normalised stream, and now reads n(z), where z
lacks the newest outputs. Those are largely predictable from z. So for each sublayer, in the order
of the forward pass and behind the sublayers that are fitted already, one matrix M is fitted by
ridge regression on a calibration text (sums over tokens):

    M = argmin |n(z) M - n(x)|^2 + l |M - 1|^2 = (G + l 1)^-1 (C + l 1),  G = n(z)^T n(z),  C = n(z)^T n(x)

n is the normalisation without its gain g, and l = ridge * trace(G) / D. M becomes part of the
projections that read the input (query, key, value; gate, up; of experts the router, every expert's
gate and up, and the shared one's gate, up and share): W <- M diag(g) W, and the gain becomes 1. So
the model has the same parameters and the same program. Nothing is trained, and biases and the other
parameters stay.

Then, if that is requested, the output projection W: with h what it reads now, and y the output that
the sublayer as it was gives of the whole input, it becomes W + X,

    X = argmin |h (W + X) - y|^2 + l |X|^2,  l = ridge * trace(h^T h) / M

sublayers.py has the forward pass and its sums over tokens.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ladder_jax import files, nn, parallel
from ladder_jax.config import ModelConfig, parse_residual, to_dict
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.nn.parameter import stack_of
from ladder_jax.pretrained.source import Key, Source, Stored, load_layer
from ladder_jax.pretrained.sublayers import ROWS, delays, programs
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

    model: the converted one, `source.model` but for its topology. rows: the calibration text's
        tokens [n, T].
    mesh: the axes data and tensor; of the weights one layer's are on the devices, of the statistics
        one sublayer's. The streams of all tokens stay on the host, (1 + delay) n T D values.
    folder: keeps the results of each sublayer; called again with equal arguments, `refit` reads
    them and goes on. Raises UserError for fewer tokens than the model's width, a source that is not
    standard, a topology that is not a ladder's, or a mesh that does not suit, and RunFailed where
    the activations are not finite.
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
    if model.residual != "standard" and not parse_residual(model.residual).is_ladder:
        raise UserError(
            f"a refit is for ladder kinds of residual, whose inputs are late, not {model.residual!r}"
        )
    definition = nn.define(parallel.with_ranks(model, tensor=mesh.shape["tensor"]), mesh=mesh)
    if definition.layout.fsdp > 1:
        raise UserError(
            "refit runs on the axes data and tensor; the mesh splits parameters over fsdp"
        )
    if folder is not None:
        _prepare(folder, _request(source, model, rows, mesh, settings))
    passes, fits = Pass(definition, source, rows), []

    def fit(layer: int, name: str, compute: Callable[[], "Computed"]) -> None:
        file = None if folder is None else folder / f"{layer:04d}-{name.replace('/', '-')}.npz"
        found, shares = _kept(file, compute)
        passes.replace(found)
        fits.append(Fit(layer, name, *shares))

    with progress(2 * model.num_layers, label="refitted {done}/{total} sublayers") as update:
        for layer in range(model.num_layers):
            entering = passes.streams
            for index, name in enumerate(SUBLAYERS):
                output = Key.of_layer(layer, f"{name}/{WRITERS[name]}", model=model)
                if passes.late(layer, index) and settings.projections is not FittedProjections.NONE:
                    fit(
                        layer,
                        name,
                        lambda: fitted_inputs(passes, layer, index, ridge=settings.ridge),
                    )
                    if settings.projections is FittedProjections.BOTH and output in source.arrays:
                        suffix = output.name.partition("/")[2]
                        fit(
                            layer,
                            suffix,
                            lambda: fitted_output(
                                passes, layer, index, output, ridge=settings.ridge
                            ),
                        )
                passes.advance(layer, index)
                update(2 * layer + index + 1, "")
            if settings.alone and passes.converted(layer):
                passes.streams = entering
                for index in (0, 1):
                    passes.advance(layer, index, original=True)
    return Refitted(passes.source, tuple(fits))


@dataclasses.dataclass
class Statistics:
    """Sums over tokens, in float64 on the host, of what a projection reads, h, and of what it is to
    give.

    Each batch is summed in float32 on the devices: an entry errs by at most n u sum |a| |b|, with n
    tokens a batch and u = 2^-24 (about sqrt(n) u of it, where the roundings' signs are random),
    however many batches there are.

    prior: 1 for an input, whose `products` [R, D, 2D] are of h = n(z) with itself and with the
    whole input; R is the number of ranks with inputs of their own. 0 for an output, whose
    `products` [1, M, M + D] are of h with itself and with what the output lacks. energy: of what is
    to be reached. missing: [R], of what lacks of it.
    """

    prior: int
    products: np.ndarray | float = 0.0
    energy: float = 0.0
    missing: np.ndarray | float = 0.0

    def add(self, products: np.ndarray, energy: np.ndarray, missing: np.ndarray) -> None:
        """Adds a batch's sums. In place where the shapes agree: of a large model they have
        gigabytes.
        """
        if np.shape(self.products) == products.shape:
            self.products += products
        else:
            self.products = self.products + np.asarray(products, np.float64)
        self.energy += float(energy)
        self.missing = self.missing + np.asarray(missing, np.float64)

    def matrices(self, parts: int, *, ridge: float) -> list[np.ndarray]:
        """M [D, D], or X [M, D], for each of `parts` equal groups of ranks; one for all where all
        have the same input.

        argmin |h M - t|^2 + l |M - P|^2 = (G + l 1)^-1 (C + l P), where h^T [h, t] = (G, C) and P
        is 1 or 0.
        """
        groups = np.split(self.products, min(parts, len(self.products)))
        return [
            solve(functools.reduce(np.add, group), prior=self.prior, ridge=ridge)
            for group in groups
        ]

    def share_missing(self, matrices: list[np.ndarray] | None = None) -> float:
        """The mean of |t - h P|^2 over the energy; with each rank's M, that of |t - h M|^2."""
        missing = np.mean(self.missing)
        if matrices is None:
            return float(missing / self.energy)
        changes = []
        for products, matrix in zip(self.products, matrices, strict=True):
            gram, cross = np.split(products, [len(products)], axis=1)
            changes.append(np.sum(matrix * (gram @ matrix - 2 * cross)))
        change = np.mean(changes)
        return float(1 + change / self.energy if self.prior else (missing + change) / self.energy)


def solve(products: np.ndarray, *, prior: int, ridge: float) -> np.ndarray:
    """(G + l 1)^-1 (C + l P) of `products` [K, K + D] = (G, C), with P = `prior` 1 and l = `ridge`
    * trace(G) / K.

    Raises RunFailed.
    """
    import scipy.linalg  # slow to import

    gram, cross = np.split(products, [len(products)], axis=1)
    penalty = ridge * np.trace(gram) / len(gram)
    pulled = cross + penalty * prior * np.eye(*cross.shape)
    gram, cross = np.array(gram, order="F"), np.array(pulled, order="F")  # which LAPACK overwrites
    gram[np.diag_indices_from(gram)] += penalty
    try:
        return scipy.linalg.solve(gram, cross, assume_a="pos", overwrite_a=True, overwrite_b=True)
    except (np.linalg.LinAlgError, ValueError) as error:  # ValueError: not finite
        raise RunFailed(
            f"no least squares: {error} (too small a ridge, {ridge:g}, or infinite activations)"
        ) from None


def folded(
    weight: np.ndarray, gain: np.ndarray, matrices: list[np.ndarray], *, axis: int
) -> np.ndarray:
    """M diag(`gain`) `weight` [D, ...] in the weight's dtype. With several M, each is of an equal
    part along `axis`.
    """
    gain, products = gain.astype(np.float64)[:, None], []
    parts = np.split(weight.astype(np.float64), len(matrices), axis=axis)
    for matrix, part in zip(matrices, parts, strict=True):
        product = matrix @ (gain * part.reshape(len(part), -1))
        products.append(product.reshape(part.shape))
    return np.concatenate(products, axis=axis).astype(weight.dtype)


class Pass:
    """The forward pass of a model on the calibration text, sublayer by sublayer.

    source: the model's arrays, which `replace` replaces. batches: (tokens [B, T], weights [B]) of
    equal shape; the rows that fill the last one have the weight 0. streams: of each batch, on the
    host.
    """

    def __init__(self, definition: nn.ModelDef, source: Source, rows: np.ndarray):
        self.definition, self.original = definition, source
        self.source = dataclasses.replace(source, model=definition.config)
        self._programs, self._delays = programs(definition), delays(definition.config)
        self._params = {
            of_original: functools.lru_cache(maxsize=1)(self._layer)
            for of_original in (False, True)
        }
        self.batches = list(_batches(rows, multiple=definition.layout.batch_ranks))
        embedding = load_layer(source, definition, None)["embedding"]
        self.streams = [
            jax.device_get(self._programs.begin(embedding, self._place(tokens, "BT")))
            for tokens, _ in self.batches
        ]

    def converted(self, layer: int) -> bool:
        return bool(self._delays[layer].any())

    def late(self, layer: int, index: int) -> bool:
        """Whether the sublayer's input lacks some output; the model's first sublayers have none to
        lack.
        """
        return min(self._delays[layer, index], 2 * layer + index) > 0

    def replace(self, arrays: Mapping[Key, Stored]) -> None:
        self.source = dataclasses.replace(self.source, arrays={**self.source.arrays, **arrays})
        self._params[False].cache_clear()

    def advance(self, layer: int, index: int, *, original: bool = False) -> None:
        """All batches through one sublayer. original: as the standard model computes it, from
        `original`'s arrays.
        """
        delay = np.int32(0) if original else self._delays[layer, index]
        run, params = (
            self._programs.advance[self._stack(layer)][index],
            self._params[original](layer, original),
        )
        self.streams = [
            jax.device_get(run(params, self._place(streams, self._programs.dims), delay))
            for streams in self.streams
        ]

    def statistics(self, layer: int, index: int) -> Statistics:
        """Of the sublayer's late input, and its whole one."""
        return self._summed(self._programs.statistics, layer, index, prior=1)

    def output_statistics(self, layer: int, index: int) -> Statistics:
        """Of the sublayer's output, and the one that `original`'s arrays give of the whole
        input.
        """
        run = self._programs.output_statistics[self._stack(layer)][index]
        both = (self._params[original](layer, original) for original in (False, True))
        return self._summed(functools.partial(run, *both), layer, index, prior=0)

    def _summed(self, run: Callable, layer: int, index: int, *, prior: int) -> Statistics:
        total, width = Statistics(prior), self.definition.config.d_model
        for streams, (_, weights) in zip(self.streams, self.batches, strict=True):
            arguments = self._place((streams, weights), (self._programs.dims, "B"))
            products, energy, missing = jax.device_get(run(*arguments, self._delays[layer, index]))
            # Without padding, and of equal ranks one.
            total.add(products[..., : products.shape[1] + width], energy, missing[: len(products)])
        return total

    def _stack(self, layer: int) -> str:
        return stack_of(self.definition.config, layer)[0]

    def _place(self, tree: Any, dims: Any) -> Any:
        return jax.tree.map(
            lambda a, d: jax.device_put(a, self.definition.layout.sharding(d)), tree, dims
        )

    def _layer(self, layer: int, original: bool) -> nn.Params:
        """A layer's arrays on the devices. original: as they were before `replace`."""
        return load_layer(self.original if original else self.source, self.definition, layer)


def _batches(rows: np.ndarray, *, multiple: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [B, T], weights [B]) of equal shape; the rows that fill the last batch have the
    weight 0.
    """
    size = -(-min(ROWS, len(rows)) // multiple) * multiple
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        missing = size - len(part)
        weights = np.repeat(np.float32([1, 0]), [len(part), missing])
        yield np.pad(part, ((0, missing), (0, 0))).astype(np.int32), weights


# fitted arrays in the source's dtypes, the shares of Fit
Computed = tuple[dict[Key, np.ndarray], tuple[float, float]]


def fitted_inputs(passes: Pass, layer: int, index: int, *, ridge: float) -> Computed:
    """A sublayer's fitted projections, and its gain of ones."""
    statistics, solved, unfitted = passes.statistics(layer, index), {}, passes.original.arrays
    of = lambda array: Key.of_layer(layer, array, model=passes.original.model)
    name = SUBLAYERS[index]
    gain = unfitted[of(f"{name}_norm/scale")].read()
    arrays = {of(f"{name}_norm/scale"): np.ones_like(gain)}
    for reads, axis in READERS[name].items():
        key = of(f"{name}/{reads}")
        if key not in unfitted:
            continue
        weight = unfitted[key].read()
        # Where several ranks share a key/value head, they share its fit.
        parts = min(len(statistics.products), weight.shape[axis])
        if parts not in solved:
            solved[parts] = statistics.matrices(parts, ridge=ridge)
        if reads.startswith("experts/"):  # in float64 one at a time
            arrays[key] = np.stack(
                [folded(expert, gain, solved[parts], axis=1) for expert in weight]
            )
        else:
            arrays[key] = folded(weight, gain, solved[parts], axis=axis)
    return arrays, (statistics.share_missing(), statistics.share_missing(solved[max(solved)]))


def fitted_output(passes: Pass, layer: int, index: int, key: Key, *, ridge: float) -> Computed:
    """The sublayer's output projection, behind its fitted inputs."""
    statistics = passes.output_statistics(layer, index)
    weight = passes.original.arrays[key].read()
    (change,) = statistics.matrices(1, ridge=ridge)
    fitted = (weight.astype(np.float64) + change.reshape(weight.shape)).astype(weight.dtype)
    return {key: fitted}, (statistics.share_missing(), statistics.share_missing([change]))


# What an interrupted run has fitted: a folder with one file for each fitted sublayer, and what they
# depend on.


def _request(
    source: Source, model: ModelConfig, rows: np.ndarray, mesh: jax.sharding.Mesh, settings: Refit
) -> dict[str, object]:
    """What the fitted arrays depend on."""
    path = pathlib.Path(source.path).resolve()
    stats = {str(file): file.stat() for file in sorted([path, *path.rglob("*")])}
    return {
        "source": [[name, found.st_size, found.st_mtime_ns] for name, found in stats.items()],
        "model": to_dict(model),
        "rows": [*rows.shape, hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()],
        "mesh": dict(mesh.shape),
        "settings": dataclasses.asdict(settings) | {"projections": settings.projections.value},
    }


def _prepare(folder: pathlib.Path, request: Mapping[str, object]) -> None:
    """Removes results in `folder` that belong to another request."""
    folder.mkdir(exist_ok=True)
    text, file = json.dumps(request, sort_keys=True), folder / "request.json"
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        for leftover in folder.glob("*.npz"):
            leftover.unlink()
        files.write(file, [text.encode()])


def _kept(
    file: pathlib.Path | None, compute: Callable[[], Computed]
) -> tuple[dict[Key, Stored], tuple[float, float]]:
    """What `compute` returns; with a file, what that holds, which is written if it is missing or
    damaged.
    """
    if file is None:
        arrays, shares = compute()
        return {key: Stored(a.shape, a.dtype, lambda a=a: a) for key, a in arrays.items()}, shares
    try:
        return _read(file)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        arrays, shares = compute()
    # Bytes: NumPy's files have no bfloat16.
    named = {
        f"{key.name} {key.layer} {a.dtype}": a.view(f"u{a.dtype.itemsize}")
        for key, a in arrays.items()
    }
    files.write_atomically(str(file), lambda path: _save(path, shares=shares, **named))
    return _read(file)


def _save(path: str, **arrays: Any) -> None:
    with open(path, "wb") as file:  # to a name, np.savez adds an ending
        np.savez(file, **arrays)


def _read(file: pathlib.Path) -> tuple[dict[Key, Stored], tuple[float, float]]:
    """The arrays, which are read again when they are asked for, so that the host holds one at a
    time.
    """

    def array(name: str) -> np.ndarray:
        with np.load(file) as content:
            return content[name].view(name.split()[2])

    with np.load(file) as content:
        names, (before, after) = set(content.files) - {"shares"}, content["shares"].tolist()
    found = {}
    for name in names:
        values, (of_key, layer, _) = array(name), name.split()  # compares its checksum
        found[Key(of_key, int(layer))] = Stored(
            values.shape, values.dtype, functools.partial(array, name)
        )
    return found, (before, after)
