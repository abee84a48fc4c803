"""What is being done, on standard error: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Gives `advance(what)`, to be called before each of `total` steps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines(total, say=console.print)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, description=what, advance=1)


def _lines(total: int, *, say: Callable[[str], None]) -> Callable[[str], None]:
    spoke, done = time.monotonic(), 0

    def advance(what: str) -> None:
        nonlocal spoke, done
        if time.monotonic() - spoke > LINE_EVERY:
            spoke = time.monotonic()
            say(f"{done}/{total}  {what}")
        done += 1

    return advance
