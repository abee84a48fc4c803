"""The sections `distill`, `conversion` and `lora`: ways to retrain a checkpoint's model
(see retrain/).
"""

import dataclasses
import enum
from typing import Any

from ladder_jax.config.fields import (
    Count,
    CountOrZero,
    Factor,
    FactorOrZero,
    Section,
    Share,
    check,
)
from ladder_jax.config.model import Interleave, layer_indices, parse_residual
from ladder_jax.errors import unknown

START = "start"
"""The value of `distill.teacher` that stands for the weights that training starts from."""
TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
"""A layer's matrices, by the names of their parameters."""


class Pace(enum.Enum):
    """How a group of layers is converted from standard to the model's own topology."""

    JUMP = "jump"  # at once
    RAMP = "ramp"  # linearly: the terms that a ladder's input leaves out fade out


@dataclasses.dataclass(frozen=True, repr=False)
class DistillConfig(Section):
    """Learn from another model's predictions as well as from the data's tokens.

    `teacher`: `start`, the weights of train.start, or the path of a checkpoint of the same shape;
        empty: none.
    `residual`: the teacher's topology, if it is not its checkpoint's: `standard` for the original
        of a converted one.
    """

    teacher: str | None = None
    residual: str | None = None
    temperature: Factor = 1.0  # divides both models' logits
    alpha: Share = 1.0  # the teacher's share of the loss; the rest is the tokens' cross-entropy
    # of the distance between both models' hidden streams, added to the loss
    hidden_weight: FactorOrZero = 0.0
    hidden_every: Count = 1  # measured after every so many layers

    NAME = "distill"

    def _check(self) -> None:
        if self.residual is not None:
            name = parse_residual(self.residual)
            check(
                name.reduces_every_output and not name.depends_on_ranks,
                f"distill.residual={self.residual} depends on the number of ranks, so a run resumed on another mesh"
                " would have another teacher: name a checkpoint of such a model (distill.teacher=PATH), or another"
                " residual, such as standard",
            )
        for name in ("residual", "hidden_weight"):
            check(
                self.teacher is not None or not getattr(self, name),
                f"distill.{name} needs a teacher: distill.teacher={START}, or a checkpoint's path",
            )


@dataclasses.dataclass(frozen=True, repr=False)
class ConversionConfig(Section):
    """Convert layers from standard to ladder during training, group by group, the topmost first."""

    steps: CountOrZero = 0  # until all are converted; 0: they are ladder layers from the first step
    groups: Count = 1
    pace: Pace = Pace.RAMP

    NAME = "conversion"

    def _check(self) -> None:
        check(
            self.steps == 0 or self.steps >= self.groups,
            f"conversion.steps={self.steps} is too few for its groups",
        )


@dataclasses.dataclass(frozen=True, repr=False)
class LoraConfig(Section):
    """Train a product of two thin matrices beside each target, and nothing else (arXiv
    2106.09685).
    """

    rank: CountOrZero = 0  # 0: none, so all weights train
    alpha: Factor = 16.0  # the product counts alpha / rank times
    targets: str = "all"  # of each layer, such as query,value

    NAME = "lora"

    def _check(self) -> None:
        for name in self._given:
            if name not in (*TARGETS, "all"):
                raise unknown("lora.targets", name, (*TARGETS, "all"))

    @property
    def names(self) -> tuple[str, ...]:
        return TARGETS if "all" in self._given else self._given

    @property
    def _given(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.targets.split(","))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


EXCLUDED = (
    (
        "train.sequence_parallel",
        ("conversion.steps", "distill.hidden_weight", "model.side"),
        "it reads whole streams",
    ),
    (
        "train.interleave=2",
        ("conversion.steps", "model.side"),
        "of whole streams it waits for every sum",
    ),
    (
        "model.moe.dense_layers",
        ("train.freeze", "lora.rank", "conversion.steps", "distill.hidden_weight"),
        "it is for layers that are all alike",
    ),
    (
        "model.side",
        ("train.freeze", "lora.rank", "conversion.steps", "distill.hidden_weight"),
        "beside a side network nothing else trains",
    ),
)
"""A setting, those that it excludes, and why."""


def check_retraining(config: Any) -> None:
    """Raises UserError for settings of a run (a RunConfig) that exclude each other, or need another
    one.
    """
    train = config.train
    model = config.model
    conversion = config.conversion
    settings = {
        "train.freeze": train.freeze,
        "lora.rank": config.lora.rank,
        "conversion.steps": conversion.steps,
        "distill.hidden_weight": config.distill.hidden_weight,
        f"distill.teacher={START}": config.distill.teacher == START,
        "model.side": model.side,
        "model.moe.dense_layers": model.moe.dense_layers if model.moe else 0,
        "train.sequence_parallel": train.sequence_parallel,
        "train.interleave=2": train.interleave is Interleave.HALVES,
    }
    for name in ("train.freeze", "lora.rank", f"distill.teacher={START}", "model.side"):
        check(
            train.start is not None or not settings[name],
            f"{name} needs train.start, the checkpoint to begin with",
        )
    for one, others, why in EXCLUDED:
        for name in others:
            check(
                not (settings[one] and settings[name]),
                f"{name}={settings[name]} and {one} exclude each other: {why}",
            )
    check(
        train.freeze <= model.num_layers,
        f"train.freeze={train.freeze} is more than model.num_layers={model.num_layers}",
    )
    check(
        not (config.lora.rank and train.freeze == model.num_layers),
        f"train.freeze={train.freeze} leaves no layer for lora.rank={config.lora.rank} to train",
    )
    check(
        not (train.z_loss and config.distill.teacher),
        f"train.z_loss={train.z_loss} has no place in a teacher's loss: leave it out with distill.teacher",
    )
    if conversion.steps:
        check(
            conversion.steps <= train.steps,
            f"conversion.steps={conversion.steps} is more than train.steps={train.steps}: the run would end with"
            f" layers that are no {model.residual} layers yet, and its checkpoints say that they are",
        )
        check(
            parse_residual(model.residual).kind in ("ladder", "ladder-fresh", "farskip"),
            "conversion.steps needs a model.residual of ladder, ladder-K, ladder-fresh or farskip, not"
            f" {model.residual!r}",
        )
        turning = len(layer_indices(model.ladder_layers or "all", model.num_layers))
        check(
            turning > 0,
            f"conversion.steps={conversion.steps} has no ladder layer to turn:"
            f" model.ladder_layers={model.ladder_layers!r}",
        )
        check(
            conversion.groups <= turning,
            f"conversion.groups={conversion.groups} is more than the {turning} layers that turn"
            f" (allowed: 1 to {turning})",
        )
