"""Refit the projections of all converted sublayers, one layer after another."""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, parallel, residual
from ladder_jax.config import ModelConfig, parse_residual, to_dict
from ladder_jax.errors import UserError
from ladder_jax.nn.parameter import stacks
from ladder_jax.pretrained.load import reader
from ladder_jax.pretrained.refit.kept import Kept
from ladder_jax.pretrained.refit.least_squares import Statistics, folded
from ladder_jax.pretrained.refit.programs import programs
from ladder_jax.pretrained.source import Key, Source, Stored

ROWS = 4  # rows per batch, at most
SUBLAYERS = ("attention", "mlp")
"""The names of a layer's two sublayers, in their order."""
READERS = {"attention": {"query": 1, "key": 1, "value": 1}, "mlp": {"gate": 1, "up": 1}}
"""The arrays that read a sublayer's input, and the dimension of each that tensor parallelism splits."""


@dataclasses.dataclass(frozen=True)
class Refit:
    """ridge: the weight of |M - 1|^2, relative to the mean square of an input's component (see refit/__init__.py).

    alone: each layer is fitted as if it were the only converted one, for a measurement of each; else behind the layers
    that are fitted already.
    """

    ridge: float = 1e-3
    alone: bool = False

    def __post_init__(self):
        if not 0 < self.ridge < float("inf"):
            raise UserError(f"the ridge must be a positive number, not {self.ridge:g}")


@dataclasses.dataclass(frozen=True)
class Fit:
    """One fitted sublayer. The mean square of what its input lacks of the whole one's, relative to the latter's: as it
    reads the late input, and after the fit, both on the calibration text.
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


def count(model: ModelConfig) -> int:
    """The number of times that `refit` calls `on_sublayer`."""
    return 2 * model.num_layers


def refit(
    source: Source,
    *,
    model: ModelConfig,
    rows: np.ndarray,
    mesh: jax.sharding.Mesh,
    settings: Refit = Refit(),
    folder: pathlib.Path | None = None,
    on_sublayer: Callable[[], object] = lambda: None,
) -> Refitted:
    """`source` with the projections fitted that read the inputs of `model`'s converted layers.

    model: the converted one, `source.model` but for its topology. rows: the calibration text's tokens [n, T].
    mesh: the axes data and tensor; of the weights one layer's are on the devices, of the statistics one sublayer's.
        The streams of all tokens stay on the host, (1 + delay) n T D values.
    folder: keeps the results of each sublayer; called again with equal arguments, `refit` reads them and goes on.
    on_sublayer: called after each sublayer of the model.
    Raises UserError for fewer tokens than the model's width, a source that is not standard, a topology that is not a
    ladder's, or a mesh that does not suit, and RunFailed where the activations are not finite.
    """
    check_rows(rows, model=model)
    if model.moe is not None:
        raise UserError(f"a refit is for dense models; {source.path!r} has experts (model.moe)")
    if len(stacks(model)) > 1:
        raise UserError(f"a refit is for layers that are all alike; {source.path!r} has model.moe.dense_layers")
    if source.model.residual != "standard":
        raise UserError(f"a refit starts from a standard model; {source.path!r} is {source.model.residual}")
    if model.residual != "standard" and not parse_residual(model.residual).is_ladder:
        raise UserError(f"a refit is for ladder kinds of residual, whose inputs are late, not {model.residual!r}")
    definition = nn.define(parallel.with_ranks(model, tensor=mesh.shape["tensor"]), mesh=mesh)
    if definition.layout.fsdp > 1:
        raise UserError("refit runs on the axes data and tensor; the mesh splits parameters over fsdp")
    kept = Kept(folder, request={} if folder is None else _request(source, model, rows, mesh, settings))
    passes, fits = Pass(definition, source, rows), []
    for layer in range(model.num_layers):
        entering = passes.streams
        for index, name in enumerate(SUBLAYERS):
            if passes.late(layer, index):
                arrays, about = _fitted(passes, layer, index, settings=settings, kept=kept)
                passes.replace(arrays)
                fits.append(Fit(layer, name, **about))
            passes.advance(layer, index)
            on_sublayer()
        if settings.alone and passes.converted(layer):
            passes.streams = entering
            for index in (0, 1):
                passes.advance(layer, index, original=True)
    return Refitted(passes.source, tuple(fits))


def check_rows(rows: np.ndarray, *, model: ModelConfig) -> None:
    """Raises UserError if the text has fewer tokens than a fit of the model has unknowns a column."""
    if rows.size < model.d_model:
        raise UserError(
            f"a refit needs at least as many tokens of calibration text as the model's width, {model.d_model};"
            f" there are {rows.size}"
        )


class Pass:
    """The forward pass of a model on the calibration text, sublayer by sublayer.

    source: the model's arrays, which `replace` replaces. streams: of each batch, on the host.
    """

    def __init__(self, definition: nn.ModelDef, source: Source, rows: np.ndarray):
        self.definition, self.original = definition, source
        self.source = dataclasses.replace(source, model=definition.config)
        self._programs, layout = programs(definition), definition.layout
        self._delays = np.array(residual.of_model(definition.config).delays, np.int32).reshape(-1, 2)
        self._read = functools.lru_cache(maxsize=2)(self._layer)
        self._place = lambda tree, dims: jax.tree.map(lambda a, d: jax.device_put(a, layout.sharding(d)), tree, dims)
        self._batches = list(_batches(rows, multiple=layout.batch_ranks))
        embedding = {"table": next(reader(self.source, definition)([Key("embedding/table")]))}
        self.streams = [
            jax.device_get(self._programs.begin(embedding, self._place(tokens, "BT"))) for tokens, _ in self._batches
        ]

    def converted(self, layer: int) -> bool:
        return bool(self._delays[layer].any())

    def late(self, layer: int, sublayer: int) -> bool:
        """Whether the sublayer's input lacks some output; the model's first sublayers have none to lack."""
        return min(self._delays[layer, sublayer], 2 * layer + sublayer) > 0

    def replace(self, arrays: Mapping[Key, Stored]) -> None:
        self.source = dataclasses.replace(self.source, arrays={**self.source.arrays, **arrays})
        self._read.cache_clear()

    def advance(self, layer: int, sublayer: int, *, original: bool = False) -> None:
        """All batches through one sublayer. original: as the standard model computes it, from `original`'s arrays."""
        params, delay = self._read(layer, original), 0 if original else self._delays[layer, sublayer]
        run = self._programs.advance[sublayer]
        self.streams = [
            jax.device_get(run(params, self._place(streams, self._programs.dims), jnp.int32(delay)))
            for streams in self.streams
        ]

    def statistics(self, layer: int, sublayer: int, *, targets: Sequence[np.ndarray] | None = None) -> Statistics:
        """Of the sublayer's late input, and its whole one or each batch's `targets`, streams [B, T, D]."""
        total, delay = Statistics.zero(self.definition.config.d_model), jnp.int32(self._delays[layer, sublayer])
        targets = [streams.newest_first[0] for streams in self.streams] if targets is None else targets
        for streams, target, (_, weights) in zip(self.streams, targets, self._batches, strict=True):
            arguments = self._place((streams, target), (self._programs.dims, "BTD"))
            total.add(*jax.device_get(self._programs.statistics(*arguments, delay, self._place(weights, "B"))))
        return total

    def _layer(self, layer: int, original: bool):
        source = dataclasses.replace(self.original, model=self.source.model) if original else self.source
        names = [key.name for key in source.arrays if key.layer == layer]
        arrays = reader(source, self.definition)([Key(name, layer) for name in names])
        flat = {name.removeprefix("layers/"): array for name, array in zip(names, arrays, strict=True)}
        return traverse_util.unflatten_dict(flat, sep="/")


def _fitted(
    passes: Pass, layer: int, index: int, *, settings: Refit, kept: Kept
) -> tuple[Mapping[Key, Stored], dict[str, float]]:
    """The fitted arrays of a sublayer, as they are kept, and its errors before and after."""
    name = SUBLAYERS[index]
    sublayer, source = f"{layer:04d}-{name}", passes.source
    if (earlier := kept.get(sublayer, {key: source.arrays[key] for key in _keys(layer, name)})) is not None:
        return earlier
    statistics = passes.statistics(layer, index)
    arrays, matrices = refitted_arrays(source, statistics, layer=layer, sublayer=name, ridge=settings.ridge)
    about = {"before": statistics.share_missing(), "after": statistics.share_missing(matrices)}
    return kept.put(sublayer, arrays, about), about


def _keys(layer: int, sublayer: str) -> list[Key]:
    names = [f"{sublayer}_norm/scale", *(f"{sublayer}/{name}" for name in READERS[sublayer])]
    return [Key(f"layers/{name}", layer) for name in names]


def _batches(rows: np.ndarray, *, multiple: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [B, T], weights [B]) of equal shape; the rows that fill the last batch have the weight 0."""
    size = -(-min(ROWS, len(rows)) // multiple) * multiple
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        missing = size - len(part)
        weights = np.repeat(np.float32([1, 0]), [len(part), missing])
        yield np.pad(part, ((0, missing), (0, 0))).astype(np.int32), weights


def _request(
    source: Source, model: ModelConfig, rows: np.ndarray, mesh: jax.sharding.Mesh, settings: Refit
) -> dict[str, object]:
    """What the fitted arrays depend on."""
    path = pathlib.Path(source.path)
    stats = [(file.name, file.stat()) for file in sorted([path, *path.rglob("*")])]
    return {
        "source": [[str(path.resolve()), *(name for name, _ in stats)], [[s.st_size, s.st_mtime_ns] for _, s in stats]],
        "model": to_dict(model),
        "rows": [*rows.shape, hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()],
        "mesh": dict(mesh.shape),
        "settings": dataclasses.asdict(settings),
    }


def refitted_arrays(
    source: Source, statistics: Statistics, *, layer: int, sublayer: str, ridge: float
) -> tuple[dict[Key, np.ndarray], list[np.ndarray]]:
    """A sublayer's fitted projections and its gain of ones, in the source's dtypes; and M, of each rank's input."""
    gain_key = Key(f"layers/{sublayer}_norm/scale", layer)
    gain, solved = source.arrays[gain_key].read(), {}
    arrays = {gain_key: np.ones_like(gain)}
    for name, axis in READERS[sublayer].items():
        key = Key(f"layers/{sublayer}/{name}", layer)
        weight = source.arrays[key].read()
        # Where several ranks share a key/value head, they share its fit.
        parts = min(len(statistics.products), weight.shape[axis])
        if parts not in solved:
            solved[parts] = statistics.matrices(parts, ridge=ridge)
        arrays[key] = folded(weight, gain, solved[parts], axis=axis)
    return arrays, solved[max(solved)]
