"""The result of measuring the sensitivity of a model's layers."""

import dataclasses
from typing import Any


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

    def as_dict(self) -> dict[str, Any]:
        """For JSON. A cost is a loss minus the standard model's loss."""
        described = lambda subset: {
            "layers": sorted(subset.layers),
            "order": list(subset.layers),
            "loss": subset.loss,
            "cost": subset.loss - self.loss,
        }
        curve = [{"layer": n, "loss": loss, "cost": loss - self.loss} for n, loss in enumerate(self.alone)]
        about = {name: getattr(self, name) for name in ("residual", "ranks", "tokens", "sequence", "loss")}
        subsets = {name: described(subset) for name, subset in self.subsets.items()}
        return {**about, "curve": curve, **subsets, "chosen": self.chosen}
