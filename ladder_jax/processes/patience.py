"""How long to wait before the end is declared."""

import dataclasses
from collections.abc import Mapping

from ladder_jax.processes.settings import given


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds.

    start: for all processes to come; lost: for a sign of life of a process; hang: for any of them to get on, which must
    be longer than the longest compilation, restoring or saving.
    """

    start: float = 300.0
    lost: float = 60.0
    hang: float = 1800.0

    @property
    def beat(self) -> float:
        """Between two signs of life."""
        return min(5.0, self.lost / 5, self.hang / 5)


def of(options: Mapping[str, str | None], environ: Mapping[str, str]) -> Patience:
    """As `settings` say. Raises UserError for what is no positive number."""
    found = given(options, environ)
    names = ("start", "lost", "hang")
    return Patience(**{name: found[f"{name}_timeout"].as_seconds() for name in names if f"{name}_timeout" in found})
