"""Measure the loss with each layer converted alone, and choose the layers to convert: by that loss, or greedily."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax import nn, residual
from ladder_jax.nn.parameter import stacks
from ladder_jax.pretrained.sensitivity.programs import programs
from ladder_jax.pretrained.sensitivity.result import Result, Subset

ROWS = 4  # rows per batch, at most


class Search(enum.Enum):
    """How to choose the layers. To choose N layers, GREEDY takes about N times as long as RANKED."""

    RANKED = "ranked"  # the layers that cost least when converted alone
    GREEDY = "greedy"  # one layer after another: the one that costs least together with those already chosen


class Probe:
    """Computes the loss of `definition`'s model with any subset of its layers converted.

    params: of each stack the layers [L, ...]; or [2L, ...], those as standard ones, then as converted ones (refitted).
    rows: tokens [n, T + 1] of the calibration text. on_loss: called after each loss.
    """

    def __init__(self, definition: nn.ModelDef, params: nn.Params, rows: np.ndarray, *, on_loss: Callable[[], None]):
        self._definition, self.num_layers = definition, definition.config.num_layers
        self._stacks = stacks(definition.config)
        self._programs, self._params, self._on_loss = programs(definition), params, on_loss
        place = lambda a: jax.device_put(a, definition.layout.sharding("BT"))
        self._batches = [(place(part[:, :-1]), place(part[:, 1:])) for part in np.split(rows, _batches(rows))]
        self._predicted = rows[:, 1:].size

    def loss(self, chosen: Iterable[int]) -> float:
        """The mean loss with the layers `chosen` converted, in nats per token."""
        total = 0.0
        for tokens, targets in self._batches:
            streams = self._advance(self._programs.begin(self._params, tokens), chosen, 0, self.num_layers)
            total += float(self._programs.loss(self._params, streams, targets))
        self._on_loss()
        return total / self._predicted

    def losses_with(self, chosen: Iterable[int], *, also: Sequence[int]) -> dict[int, float]:
        """For each layer of `also`: the mean loss with it and the layers `chosen` converted, in nats per token."""
        totals = dict.fromkeys(also, 0.0)
        for tokens, targets in self._batches:
            before, at = self._programs.begin(self._params, tokens), 0
            for layer in sorted(also):
                before, at = self._advance(before, chosen, at, layer), layer
                streams = self._advance(before, {*chosen, layer}, layer, self.num_layers)
                totals[layer] += float(self._programs.loss(self._params, streams, targets))
                self._on_loss()
        return {layer: total / self._predicted for layer, total in totals.items()}

    def _advance(self, streams, chosen: Iterable[int], start: int, stop: int):
        delays, converted = self._delays(chosen), np.isin(np.arange(self.num_layers), list(chosen))
        for stack, of in self._stacks.items():
            params, first, last = self._params[stack], max(start, of.start) - of.start, min(stop, of.stop) - of.start
            if first >= last:
                continue
            apart = jax.tree.leaves(params)[0].shape[0] - len(of)  # of a layer's converted entry from its standard one
            entries = np.arange(len(of), dtype=np.int32) + apart * converted[of.start : of.stop]
            where = (delays[of.start : of.stop], entries.astype(np.int32), np.int32(first), np.int32(last))
            streams = self._programs.advance[stack](params, streams, *map(jnp.asarray, where))
        return streams

    def _delays(self, chosen: Iterable[int]) -> np.ndarray:
        """Of the model whose layers `chosen` are converted, [L, 2], in sublayers."""
        layers = ",".join(map(str, sorted(chosen)))
        hybrid = dataclasses.replace(self._definition.config, ladder_layers=f"{layers}," if layers else "0")
        return np.array(residual.of_model(hybrid).delays, np.int32).reshape(-1, 2)


def count(rows: np.ndarray, *, num_layers: int, choose: int, search: Search) -> int:
    """The number of losses that `measure` computes."""
    greedy = sum(num_layers - done for done in range(1, choose)) if search is Search.GREEDY else 0
    return 3 + _batches(rows) * (num_layers + greedy)


def measure(
    definition: nn.ModelDef,
    params: nn.Params,
    rows: np.ndarray,
    *,
    choose: int,
    search: Search = Search.GREEDY,
    on_loss: Callable[[], None] = lambda: None,
) -> Result:
    """The sensitivity curve of a model, and the choices of `choose` of its layers.

    definition: with all layers of the ladder kind. params: on its mesh, as in `Probe`. rows: tokens [n, T + 1].
    search: GREEDY adds the greedy choice to the others. on_loss: called after each of the `count` losses.
    """
    probe = Probe(definition, params, rows, on_loss=on_loss)
    layers = range(probe.num_layers)
    standard = probe.loss(())
    alone = probe.losses_with((), also=layers)
    subset = lambda order: Subset(tuple(order), probe.loss(order) if order else standard)
    ranked = subset(sorted(layers, key=lambda layer: alone[layer])[:choose])
    last = subset(layers[probe.num_layers - choose :])
    greedy = _greedy(probe, alone, choose=choose, standard=standard) if search is Search.GREEDY else None
    return Result(
        residual=definition.config.residual,
        ranks=definition.config.ranks,
        tokens=rows[:, 1:].size,
        sequence=rows.shape[1] - 1,
        loss=standard,
        alone=tuple(alone[layer] for layer in layers),
        last=last,
        ranked=ranked,
        greedy=greedy,
    )


def _greedy(probe: Probe, alone: dict[int, float], *, choose: int, standard: float) -> Subset:
    """The greedy choice, with its layers in the order in which they were chosen."""
    chosen: list[int] = []
    losses, best = alone, standard
    while len(chosen) < choose:
        if chosen:
            losses = probe.losses_with(chosen, also=[n for n in range(probe.num_layers) if n not in chosen])
        layer = min(losses, key=lambda layer: losses[layer])
        chosen, best = [*chosen, layer], losses[layer]
    return Subset(tuple(chosen), best)


def _batches(rows: np.ndarray) -> int:
    """The number of batches of equal size into which the rows are split."""
    return len(rows) // next(size for size in range(min(ROWS, len(rows)), 0, -1) if len(rows) % size == 0)
