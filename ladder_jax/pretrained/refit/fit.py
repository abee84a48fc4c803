"""Refit the projections of all converted sublayers, one layer after another."""

import dataclasses
import enum
import hashlib
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from ladder_jax import nn, parallel
from ladder_jax.config import ModelConfig, parse_residual, to_dict
from ladder_jax.errors import UserError
from ladder_jax.pretrained.refit.kept import Kept
from ladder_jax.pretrained.refit.passes import Pass
from ladder_jax.pretrained.refit.projections import (
    SUBLAYERS,
    gain_key,
    output_key,
    readers,
    refitted_arrays,
    refitted_output,
)
from ladder_jax.pretrained.source import Key, Source


class FittedProjections(enum.Enum):
    """Which projections of a sublayer are fitted."""

    INPUTS = "inputs"  # those that read its input
    BOTH = "both"  # and its output projection


@dataclasses.dataclass(frozen=True)
class Refit:
    """ridge: the weight of |M - 1|^2, relative to the mean square of an input's component (see refit/__init__.py).

    alone: each layer is fitted as if it were the only converted one, for a measurement of each; else behind the layers
    that are fitted already.
    """

    ridge: float = 1e-3
    projections: FittedProjections = FittedProjections.INPUTS
    alone: bool = False

    def __post_init__(self):
        if not 0 < self.ridge < float("inf"):
            raise UserError(f"the ridge must be a positive number, not {self.ridge:g}")


@dataclasses.dataclass(frozen=True)
class Fit:
    """One fitted sublayer, "attention" or "mlp". The mean square of what its input lacks of the whole one's, relative
    to the latter's: as it reads the late input, and after the fit, both on the calibration text.

    Or its output projection, "attention/out" or "mlp/down": the same of its output, behind the fitted input.
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
    if source.model.residual != "standard":
        raise UserError(f"a refit starts from a standard model; {source.path!r} is {source.model.residual}")
    if model.residual != "standard" and not parse_residual(model.residual).is_ladder:
        raise UserError(f"a refit is for ladder kinds of residual, whose inputs are late, not {model.residual!r}")
    definition = nn.define(parallel.with_ranks(model, tensor=mesh.shape["tensor"]), mesh=mesh)
    if definition.layout.fsdp > 1:
        raise UserError("refit runs on the axes data and tensor; the mesh splits parameters over fsdp")
    kept = Kept(folder, request={} if folder is None else _request(source, model, rows, mesh, settings))
    passes, fits = Pass(definition, source, rows), []
    both = settings.projections is FittedProjections.BOTH
    for layer in range(model.num_layers):
        entering = passes.streams
        for index in (0, 1):
            if passes.late(layer, index):
                fits.append(_fit_inputs(passes, layer, index, ridge=settings.ridge, kept=kept))
                if both and output_key(layer, SUBLAYERS[index], model=model) in source.arrays:
                    fits.append(_fit_output(passes, layer, index, ridge=settings.ridge, kept=kept))
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


def _fit_inputs(passes: Pass, layer: int, index: int, *, ridge: float, kept: Kept) -> Fit:
    name, source = SUBLAYERS[index], passes.source

    def compute():
        statistics = passes.statistics(layer, index)
        arrays, matrices = refitted_arrays(source, statistics, layer=layer, sublayer=name, ridge=ridge)
        return arrays, {"before": statistics.share_missing(), "after": statistics.share_missing(matrices)}

    keys = [gain_key(layer, name, model=source.model), *readers(source, layer, name)]
    return _replaced(passes, layer, name, keys, compute, kept=kept)


def _fit_output(passes: Pass, layer: int, index: int, *, ridge: float, kept: Kept) -> Fit:
    """Behind the sublayer's fitted inputs."""
    key = output_key(layer, SUBLAYERS[index], model=passes.source.model)

    def compute():
        statistics = passes.output_statistics(layer, index)
        array, change = refitted_output(passes.source.arrays[key].read(), statistics, ridge=ridge)
        return {key: array}, {"before": statistics.share_missing(), "after": statistics.share_missing(change)}

    return _replaced(passes, layer, key.name.partition("/")[2], [key], compute, kept=kept)


def _replaced(
    passes: Pass, layer: int, name: str, keys: Sequence[Key], compute: Callable[[], tuple], *, kept: Kept
) -> Fit:
    """Gives `passes` the fitted arrays of `keys`: those that were kept, or those that `compute` returns."""
    place = f"{layer:04d}-{name.replace('/', '-')}"
    found = kept.get(place, {key: passes.source.arrays[key] for key in keys})
    if found is None:
        arrays, about = compute()
        found = kept.put(place, arrays, about), about
    passes.replace(found[0])
    return Fit(layer, name, **found[1])


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
        "settings": dataclasses.asdict(settings) | {"projections": settings.projections.value},
    }
