"""What was measured of a model's layers."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Subset:
    """layers: converted together, 0-based, in the order in which they were taken; loss: then, in nats a token."""

    layers: tuple[int, ...]
    loss: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Losses are means over the calibration text, in nats a token, without any retraining.

    residual, ranks: of the converted layers; tokens: predicted, in sequences of `sequence`; loss: of the standard
    model; alone: of each layer converted alone; last: the paper's choice, the last layers; ranked: those that cost
    least alone; greedy: one by one, or None.
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
        """Every choice of layers, by how it was made."""
        found = {"last": self.last, "ranked": self.ranked, "greedy": self.greedy}
        return {name: subset for name, subset in found.items() if subset is not None}

    @property
    def chosen(self) -> str:
        """The best of them, as measured together. Of equals, the simplest."""
        return min(self.subsets, key=lambda name: self.subsets[name].loss)

    @property
    def ladder_layers(self) -> str:
        """The choice, as `model.ladder_layers` is written."""
        return "".join(f"{layer}," for layer in sorted(self.subsets[self.chosen].layers)) or "0"

    def as_dict(self) -> dict[str, Any]:
        """For JSON. A cost is a loss minus that of the standard model."""
        told = lambda subset: {
            "layers": sorted(subset.layers),
            "order": list(subset.layers),
            "loss": subset.loss,
            "cost": subset.loss - self.loss,
        }
        curve = [{"layer": n, "loss": loss, "cost": loss - self.loss} for n, loss in enumerate(self.alone)]
        about = {name: getattr(self, name) for name in ("residual", "ranks", "tokens", "sequence", "loss")}
        subsets = {name: told(subset) for name, subset in self.subsets.items()}
        return {**about, "curve": curve, **subsets, "chosen": self.chosen}
