"""The sensitivity of layers: the loss on a text with layers converted to ladder layers, singly and
together.
"""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import jax
import numpy as np

from ladder_jax import nn, terminal
from ladder_jax.config import Json
from ladder_jax.errors import RunFailed
from ladder_jax.nn.parameter import stack_of
from ladder_jax.pretrained.source import Source, load_layer
from ladder_jax.pretrained.sublayers import Streams, batches, delays, programs


class Search(enum.Enum):
    """How to choose the layers. To choose N layers, GREEDY takes about N times as long as
    RANKED.
    """

    RANKED = "ranked"  # the layers that cost least when converted alone
    # one layer after another: the one that costs least together with those already chosen
    GREEDY = "greedy"


def listed(layers: Iterable[int]) -> str:
    """In the syntax of `model.ladder_layers`, where "0" is none of them."""
    return "".join(f"{layer}," for layer in sorted(layers)) or "0"


def best(subsets: Mapping[str, Json]) -> str:
    """The name of that with the lowest loss; if equal, the first."""
    return min(subsets, key=lambda name: subsets[name]["loss"])


class Probe:
    """Computes the loss of `definition`'s model with any subset of its layers converted.

    converted: the arrays of layers where they are converted (refitted); by default `source`'s.
    rows: tokens [n, T + 1] of the calibration text.
    """

    def __init__(
        self,
        definition: nn.ModelDef,
        source: Source,
        rows: np.ndarray,
        *,
        converted: Source | None = None,
    ):
        self._config = definition.config
        self._programs = programs(definition)
        kept = lambda of: functools.cache(functools.partial(load_layer, of, definition))
        plain = kept(source)
        # what gives a layer's parameters, by whether it is converted
        self._layers = {False: plain, True: kept(converted) if converted else plain}
        self._outside = plain(None)
        sharding = definition.layout.sharding("BT")
        self._batches = []
        for part in batches(rows):
            tokens = jax.device_put(part[:, :-1], sharding)
            targets = jax.device_put(part[:, 1:], sharding)
            self._batches.append((tokens, targets))
        self._predicted = rows[:, 1:].size

    def loss(self, chosen: Iterable[int]) -> float:
        """The mean loss with the layers `chosen` converted, in nats per token.

        Raises RunFailed where it is not finite.
        """
        return self._loss(self._begin(), chosen, 0)

    def losses_with(self, chosen: Iterable[int]) -> Iterator[tuple[int, float]]:
        """Each other layer, and the mean loss with it and the layers `chosen` converted, in nats
        per token.

        Subsets that agree in their first layers share the result of those.
        """
        before = self._begin()
        at = 0
        for layer in range(self._config.num_layers):
            if layer not in chosen:
                before = [self._advance(one, chosen, at, layer) for one in before]
                at = layer
                yield layer, self._loss(before, {*chosen, layer}, layer)

    def _begin(self) -> list[Streams]:
        return [
            self._programs.begin(self._outside["embedding"], tokens) for tokens, _ in self._batches
        ]

    def _loss(self, before: list[Streams], chosen: Iterable[int], start: int) -> float:
        """From the streams of each batch before layer `start`."""
        total = 0.0
        for streams, (_, targets) in zip(before, self._batches, strict=True):
            streams = self._advance(streams, chosen, start, self._config.num_layers)
            total += float(self._programs.loss(self._outside, streams, targets))
        if not math.isfinite(total):  # no layer would cost least
            raise RunFailed(
                f"the loss with ladder layers {listed(chosen)} is no number: the model's weights are not, or overflow"
            )
        return total / self._predicted

    def _advance(self, streams: Streams, chosen: Iterable[int], start: int, stop: int) -> Streams:
        late = delays(dataclasses.replace(self._config, ladder_layers=listed(chosen)))
        for layer in range(start, stop):
            stack, _ = stack_of(self._config, layer)
            params = self._layers[layer in chosen](layer)
            for run, delay in zip(self._programs.advance[stack], late[layer]):
                streams = run(params, streams, delay)
        return streams


def measure(
    definition: nn.ModelDef,
    source: Source,
    rows: np.ndarray,
    *,
    choose: int,
    converted: Source | None = None,
    search: Search = Search.GREEDY,
) -> Json:
    """The sensitivity curve of a model, and the choices of `choose` of its layers, at least one, by
    three methods: "last", the last layers, the paper's choice; "ranked", those that cost least
    alone; and if `search` is GREEDY, "greedy". "chosen" is the best method.

    Losses are means over the calibration text, in nats per token, without any retraining; a cost is
    a loss minus that of the standard model, "loss". "order": a choice's layers, as they were chosen.

    definition: with all layers of the ladder kind. converted, rows: as in `Probe`.
    """
    probe = Probe(definition, source, rows, converted=converted)
    num_layers = definition.config.num_layers
    rounds = choose if search is Search.GREEDY else 1
    total = sum(num_layers - done for done in range(rounds))
    count = itertools.count(1)
    # of each round, the losses with one more layer, and that which costs least
    found = []
    greedy = []
    with terminal.progress(total, label="measured {done}/{total} losses") as update:
        for _ in range(rounds):
            losses = {}
            for layer, loss in probe.losses_with(greedy):
                losses[layer] = loss
                update(next(count), "")
            found.append(losses)
            greedy.append(min(losses, key=losses.get))
    alone = found[0]
    standard = probe.loss(())

    def subset(order: list[int], loss: float) -> Json:
        cost = loss - standard
        return {"layers": sorted(order), "order": order, "loss": loss, "cost": cost}

    last = list(range(num_layers - choose, num_layers))
    ranked = sorted(alone, key=alone.get)[:choose]
    subsets = {
        "last": subset(last, probe.loss(last)),
        "ranked": subset(ranked, probe.loss(ranked)),
    }
    if search is Search.GREEDY:
        subsets["greedy"] = subset(greedy, found[-1][greedy[-1]])
    return {
        "residual": definition.config.residual,
        "ranks": definition.config.ranks,
        "tokens": rows[:, 1:].size,
        "sequence": rows.shape[1] - 1,
        "loss": standard,
        "curve": [
            {"layer": layer, "loss": loss, "cost": loss - standard} for layer, loss in alone.items()
        ],
        **subsets,
        "chosen": best(subsets),
    }
