"""What can be said about the processes of a run, as an option or in the environment."""

import dataclasses
from collections.abc import Mapping

from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Setting:
    """`--option VALUE`, or `variable` in the environment."""

    name: str
    metavar: str
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "LADDER_JAX_" + self.name.upper()


@dataclasses.dataclass(frozen=True)
class Given:
    """A setting's value, as text, and where it comes from."""

    value: str
    source: str

    def as_int(self) -> int:
        try:
            return int(self.value)
        except ValueError:
            raise UserError(f"{self.source} must be a whole number, not {self.value!r}") from None

    def as_seconds(self) -> float:
        """Above zero: infinity ("inf") is for ever."""
        try:
            seconds = float(self.value)
        except ValueError:
            seconds = float("nan")
        if not seconds > 0:
            raise UserError(f"{self.source} must be a positive number of seconds, not {self.value!r}")
        return seconds


SETTINGS = (
    Setting("coordinator", "HOST:PORT", "where process 0 listens"),
    Setting("processes", "N", "how many processes train together"),
    Setting("process", "I", "which of them this is: 0 to N - 1"),
    Setting("start_timeout", "SECONDS", "wait so long for all to start (300)"),
    Setting("lost_timeout", "SECONDS", "a process is lost after so long without a sign of life (60)"),
    Setting("hang_timeout", "SECONDS", "the run hangs if no process gets on for so long (1800; inf: never)"),
)


def given(options: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, Given]:
    """The settings that have a value, by name; an option goes before its variable."""
    found = {}
    for setting in SETTINGS:
        if (value := options.get(setting.name)) is not None:
            found[setting.name] = Given(value, setting.option)
        elif value := environ.get(setting.variable):
            found[setting.name] = Given(value, setting.variable)
    return found
