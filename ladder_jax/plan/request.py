"""The checked arguments of `ladder-jax plan`; imports no jax."""

import dataclasses
import math

from ladder_jax.config import ModelConfig, parse_residual
from ladder_jax.config.fields import check
from ladder_jax.errors import UserError
from ladder_jax.schedule import models, targets
from ladder_jax.schedule.targets import Target


@dataclasses.dataclass(frozen=True)
class Request:
    """name: of the model, as the user typed it. tokens: of one optimizer step over all devices. sequence: tokens each.

    changes: settings of the model that the options change, as (dotted name, value).
    """

    name: str
    config: ModelConfig
    target: Target
    tokens: int
    sequence: int
    changes: tuple[tuple[str, str | int | float], ...] = ()

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence


def make(
    *,
    model: str,
    target: str,
    tokens: int,
    sequence: int = 2048,
    residual: str | None = None,
    layers: int | None = None,
    capacity: float | None = None,
) -> Request:
    """A checked request. model: as in `schedule.models.by_name`. Raises UserError for an invalid request."""
    parsed = targets.parse(target)
    changes = {"residual": residual, "num_layers": layers}
    changes = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(models.by_name(model), **changes)
    if capacity is not None:
        check(config.moe is not None, f"--capacity {capacity} is of experts, which {model} has not (model.moe)")
        check(0 < capacity < math.inf, f"--capacity must be positive, not {capacity}")
        config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity=capacity))
        changes["moe.capacity"] = capacity
    models.check_alone(config, verb="plan")
    for name, value in (("tokens", tokens), ("sequence", sequence)):
        if value < 1:
            raise UserError(f"--{name} must be positive, not {value}")
    if tokens % sequence:
        below, above = tokens // sequence * sequence, (tokens // sequence + 1) * sequence
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(f"--tokens {tokens} are not a multiple of --sequence {sequence}: {near} would be")
    if parse_residual(config.residual).depends_on_ranks and config.ranks is None:
        raise UserError(f"{config.residual} is a function of the number of ranks: give model.ranks in a file")
    settings = tuple((f"model.{name}", value) for name, value in changes.items())
    return Request(model, config, parsed, tokens, sequence, settings)
