"""`--profile FIRST:LAST`: a trace of these steps, for xprof, TensorBoard or Perfetto."""

import pathlib

import jax

from ladder_jax.errors import UserError


def parse(words: str) -> range:
    """`10:13` is the steps 10 to 13, both included; `10` is that step alone. Raises UserError for anything else."""
    first, colon, last = words.partition(":")
    last = last if colon else first
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise UserError(f"--profile {words}: not FIRST:LAST with 1 <= FIRST <= LAST, such as 10:13")
    return range(int(first), int(last) + 1)


class Profile:
    """Traces the steps of `steps` that this process makes, into `folder`; None traces nothing."""

    def __init__(self, steps: range | None, *, folder: pathlib.Path):
        self._steps, self._folder, self._running = steps or range(0), folder, False

    def __str__(self) -> str:
        return f"{self._steps[0]} to {self._steps[-1]}"

    def before(self, step: int, *, waited_for: object) -> None:
        """Start with this step, if it is the first. Earlier ones (`waited_for`) do not belong in it."""
        if step in self._steps and not self._running:
            jax.block_until_ready(waited_for)
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, *, waited_for: object) -> bool:
        """End with this step, if it is the last; whether it was."""
        if not self._running or step < self._steps[-1]:
            return False
        jax.block_until_ready(waited_for)
        self.close()
        return True

    def close(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
