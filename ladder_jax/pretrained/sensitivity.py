"""The sensitivity of layers: the loss on a text with layers converted to ladder layers, singly and together."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ladder_jax import files, nn, pyplot, terminal
from ladder_jax.nn.parameter import stack_of, stacks
from ladder_jax.pretrained.sublayers import ROWS, Streams, delays, programs
from ladder_jax.terminal import Table


class Search(enum.Enum):
    """How to choose the layers. To choose N layers, GREEDY takes about N times as long as RANKED."""

    RANKED = "ranked"  # the layers that cost least when converted alone
    GREEDY = "greedy"  # one layer after another: the one that costs least together with those already chosen


@dataclasses.dataclass(frozen=True)
class Subset:
    """layers: the converted layers, from 0, in the order of their choice. loss: with these, in nats per token."""

    layers: tuple[int, ...]
    loss: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Losses are means over the calibration text, in nats per token, without any retraining.

    residual, ranks: of the converted layers. tokens: the number of predicted tokens. sequence: their sequences' length.
    loss: of the standard model. alone: with each layer converted alone. last: with the last layers converted, the
    paper's choice. ranked: with the layers that cost least alone. greedy: with the greedy choice, or None.
    """

    residual: str
    ranks: int | None
    tokens: int
    sequence: int
    loss: float
    alone: tuple[float, ...]
    last: Subset
    ranked: Subset
    greedy: Subset | None

    @property
    def subsets(self) -> dict[str, Subset]:
        """The choices of layers, by the method of choice."""
        subsets = {"last": self.last, "ranked": self.ranked, "greedy": self.greedy}
        return {name: subset for name, subset in subsets.items() if subset is not None}

    @property
    def chosen(self) -> str:
        """The method whose subset has the lowest loss; if equal, the simplest method."""
        return min(self.subsets, key=lambda name: self.subsets[name].loss)

    @property
    def ladder_layers(self) -> str:
        """The chosen layers, in the syntax of `model.ladder_layers`."""
        return "".join(f"{layer}," for layer in sorted(self.subsets[self.chosen].layers)) or "0"

    @property
    def costs(self) -> list[float]:
        """Of each layer alone: its loss minus the standard model's."""
        return [loss - self.loss for loss in self.alone]

    def as_dict(self) -> dict[str, Any]:
        """For JSON. A cost is a loss minus the standard model's loss."""
        described = lambda subset: {
            "layers": sorted(subset.layers),
            "order": list(subset.layers),
            "loss": subset.loss,
            "cost": subset.loss - self.loss,
        }
        curve = [{"layer": n, "loss": self.alone[n], "cost": cost} for n, cost in enumerate(self.costs)]
        about = {name: getattr(self, name) for name in ("residual", "ranks", "tokens", "sequence", "loss")}
        subsets = {name: described(subset) for name, subset in self.subsets.items()}
        return {**about, "curve": curve, **subsets, "chosen": self.chosen}


class Probe:
    """Computes the loss of `definition`'s model with any subset of its layers converted.

    params: unrolled, of each stack a tuple of layers; converted: those of layers where they are converted (refitted).
    rows: tokens [n, T + 1] of the calibration text. on_loss: called after each loss.
    """

    def __init__(
        self,
        definition: nn.ModelDef,
        params: nn.Params,
        rows: np.ndarray,
        *,
        converted: nn.Params | None = None,
        on_loss: Callable[[], None] = lambda: None,
    ):
        self._config, self._on_loss, self._programs = definition.config, on_loss, programs(definition)
        self._layers = {False: params, True: params if converted is None else converted}
        self._outside = {name: tree for name, tree in params.items() if name not in stacks(self._config)}
        place = lambda a: jax.device_put(a, definition.layout.sharding("BT"))
        parts = np.split(rows, _batches(rows))
        self._batches = [(place(part[:, :-1]), place(part[:, 1:])) for part in parts]
        self._predicted = rows[:, 1:].size

    def loss(self, chosen: Iterable[int]) -> float:
        """The mean loss with the layers `chosen` converted, in nats per token."""
        total = 0.0
        for tokens, targets in self._batches:
            total += self._summed(self._begin(tokens), chosen, 0, targets)
        self._on_loss()
        return total / self._predicted

    def losses_with(self, chosen: Iterable[int], *, also: Sequence[int]) -> dict[int, float]:
        """For each layer of `also`: the mean loss with it and the layers `chosen` converted, in nats per token.

        Subsets that agree in their first layers share the result of those.
        """
        totals = dict.fromkeys(also, 0.0)
        for tokens, targets in self._batches:
            before, at = self._begin(tokens), 0
            for layer in sorted(also):
                before, at = self._advance(before, chosen, at, layer), layer
                totals[layer] += self._summed(before, {*chosen, layer}, layer, targets)
                self._on_loss()
        return {layer: total / self._predicted for layer, total in totals.items()}

    def _begin(self, tokens: jax.Array) -> Streams:
        return self._programs.begin(self._outside["embedding"], tokens)

    def _summed(self, streams: Streams, chosen: Iterable[int], start: int, targets: jax.Array) -> float:
        """The loss of a batch, from the streams before layer `start`."""
        streams = self._advance(streams, chosen, start, self._config.num_layers)
        return float(self._programs.loss(self._outside, streams, targets))

    def _advance(self, streams: Streams, chosen: Iterable[int], start: int, stop: int) -> Streams:
        layers = "".join(f"{layer}," for layer in sorted(chosen)) or "0"
        late = delays(dataclasses.replace(self._config, ladder_layers=layers))
        for layer in range(start, stop):
            stack, place = stack_of(self._config, layer)
            params = self._layers[layer in chosen][stack][place]
            for run, delay in zip(self._programs.advance[stack], late[layer]):
                streams = run(params, streams, delay)
        return streams


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
    converted: nn.Params | None = None,
    search: Search = Search.GREEDY,
    on_loss: Callable[[], None] = lambda: None,
) -> Result:
    """The sensitivity curve of a model, and the choices of `choose` of its layers.

    definition: with all layers of the ladder kind. params, converted: on its mesh, as in `Probe`. rows: tokens
    [n, T + 1]. search: GREEDY adds the greedy choice to the others. on_loss: called after each of the `count` losses.
    """
    probe = Probe(definition, params, rows, converted=converted, on_loss=on_loss)
    num_layers = definition.config.num_layers
    standard = probe.loss(())
    alone = probe.losses_with((), also=range(num_layers))
    subset = lambda order: Subset(tuple(order), probe.loss(order) if order else standard)
    return Result(
        residual=definition.config.residual,
        ranks=definition.config.ranks,
        tokens=rows[:, 1:].size,
        sequence=rows.shape[1] - 1,
        loss=standard,
        alone=tuple(alone.values()),
        ranked=subset(sorted(alone, key=lambda layer: alone[layer])[:choose]),
        last=subset(range(num_layers - choose, num_layers)),
        greedy=_greedy(probe, alone, choose=choose, standard=standard) if search is Search.GREEDY else None,
    )


def _greedy(probe: Probe, alone: dict[int, float], *, choose: int, standard: float) -> Subset:
    """The greedy choice, with its layers in the order in which they were chosen."""
    chosen: list[int] = []
    losses, best = alone, standard
    while len(chosen) < choose:
        if chosen:
            losses = probe.losses_with(chosen, also=[layer for layer in alone if layer not in chosen])
        layer = min(losses, key=lambda layer: losses[layer])
        chosen, best = [*chosen, layer], losses[layer]
    return Subset(tuple(chosen), best)


def _batches(rows: np.ndarray) -> int:
    """The number of batches of equal size into which the rows are split."""
    count = len(rows)
    sizes = (size for size in range(min(ROWS, count), 0, -1) if count % size == 0)
    return count // next(sizes)


BAR = 40  # characters of the longest bar
NAMES = {"last": "the last", "ranked": "least sensitive", "greedy": "greedily"}


def show(result: Result) -> None:
    """Print the curve, and the cost of each choice of layers, as tables on standard output."""
    head = f"the standard model's loss is {result.loss:.4f} nats a token"
    measured = f"of {result.tokens:,} tokens in sequences of {result.sequence:,}; one {result.residual} layer costs"
    longest = max(*result.costs, 1e-9)
    bar = lambda cost: "#" * round(BAR * max(cost, 0) / longest)
    lines = [(str(n), f"{cost:+.4f}", bar(cost)) for n, cost in enumerate(result.costs)]
    rows = []
    for name, subset in result.subsets.items():
        mark = " (taken)" if name == result.chosen else ""
        layers = ", ".join(map(str, sorted(subset.layers)))
        rows.append((NAMES[name] + mark, layers, f"{subset.loss - result.loss:+.4f}"))
    choices = Table(("chosen", "layers", "nats"), rows, ("chosen", "layers"))
    terminal.show([head, measured, Table(("layer", "nats", ""), lines, ("",)), choices])


CHOSEN, OTHERS = "#4c78a8", "#bab0ac"


def plot(result: Result, *, file: str) -> None:
    """Write the curve to `file`. The scale is logarithmic: a few layers cost a hundred times as much as the others."""
    plt = pyplot.load()
    shown = [max(cost, 1e-4) for cost in result.costs]  # below this it is noise, or a gain
    chosen = result.subsets[result.chosen].layers
    colours = [CHOSEN if layer in chosen else OTHERS for layer in range(len(shown))]
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.bar(range(len(shown)), shown, color=colours)
    axes.set(yscale="log", xlabel="layer, converted alone", ylabel="cost in nats a token")
    choices = [f"{NAMES[name]} {len(s.layers)}: {s.loss - result.loss:+.3f}" for name, s in result.subsets.items()]
    axes.set_title(f"{result.residual} layers without retraining; together, {', '.join(choices)} (blue)", fontsize=10)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    plt.close(figure)
