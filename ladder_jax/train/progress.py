"""A live progress bar on a terminal; a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Progress:
    """A context manager: `update(step, loss=..., tokens_per_second=...)`."""

    def __init__(self, *, total: int, start: int, say: Callable[[str], None]):
        self._total, self._say = total, say
        self._began, self._start, self._spoke = time.perf_counter(), start, 0.0
        console = Console(file=sys.stderr)
        self._bar = None
        if console.is_terminal:
            columns = (
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TextColumn("{task.fields[rate]:,.0f} tokens/s"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("training", total=total, completed=start, loss=float("nan"), rate=0.0)

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step, loss=loss, rate=tokens_per_second)
            return
        now = time.perf_counter()
        if step == self._total or now - self._spoke > LINE_EVERY:
            self._spoke = now
            left = (now - self._began) / max(step - self._start, 1) * (self._total - step)
            self._say(
                f"step {step}/{self._total}  loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {left:.0f} s left"
            )
