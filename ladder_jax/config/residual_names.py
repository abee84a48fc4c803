"""The names of the residual topologies, and which layers of a hybrid are ladder layers."""

import dataclasses
import numbers
import re

from ladder_jax.errors import UserError, unknown

NAMES = (
    "standard",
    "ladder",
    "ladder-2",
    "ladder-fresh",
    "parallel",
    "parallel-shared-norm",
    "parallel-ladder",
    "desync-2",
    "no-communication",
)


@dataclasses.dataclass(frozen=True)
class ResidualName:
    """kind: the name without its number; number: the delay of a ladder, the period of a desync."""

    kind: str
    number: int = 1

    @property
    def is_ladder(self) -> bool:
        return self.kind in ("ladder", "ladder-fresh", "parallel-ladder")

    @property
    def depends_on_ranks(self) -> bool:
        """Whether another number of tensor-parallel ranks makes it another function."""
        return self.kind in ("ladder-fresh", "desync")


def parse(name: str) -> ResidualName:
    """Of any name in NAMES, `ladder-K` and `desync-N`, numbers from 1. Raises UserError for any other."""
    numbered = re.fullmatch(r"(ladder|desync)-([1-9]\d*)", name)
    if numbered:
        return ResidualName(numbered[1], int(numbered[2]))
    if name in NAMES:
        return ResidualName(name)
    raise unknown("residual", name, (*NAMES, "ladder-K", "desync-N"))


def as_text(which: object) -> object:
    """2, (0, 2) and [0, 2] as text for `layer_indices`, "2" and "0,2,"; any other value unchanged."""
    if isinstance(which, list | tuple | range):
        return ",".join(map(str, which)) + ","
    return str(which) if isinstance(which, numbers.Integral) and not isinstance(which, bool) else which


def layer_indices(which: str, num_layers: int) -> tuple[int, ...]:
    """The 0-based layers that `which` names: `"N"` the last N, `"i,j"` or `"i,"` a list, `"all"`."""
    allowed = f"(allowed: N for the last N of {num_layers} layers, a list i,j of 0 to {num_layers - 1}, or all)"
    if which == "all":
        return tuple(range(num_layers))
    if which.startswith("auto:"):
        raise UserError(f"ladder_layers={which!r} is measured, so only a conversion can choose it {allowed}")
    try:
        numbers = [int(part) for part in which.split(",") if part.strip()]
    except ValueError:
        raise UserError(f"ladder_layers={which!r} is not a choice of layers {allowed}") from None
    if "," not in which:
        if not numbers or not 0 <= numbers[0] <= num_layers:
            raise UserError(f"ladder_layers={which!r} is not a number of layers {allowed}")
        return tuple(range(num_layers - numbers[0], num_layers))
    if len(set(numbers)) != len(numbers) or any(not 0 <= n < num_layers for n in numbers):
        raise UserError(f"ladder_layers={which!r} names a layer twice or out of range {allowed}")
    return tuple(sorted(numbers))
