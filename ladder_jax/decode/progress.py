"""How many requests are done, on standard error: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


@contextlib.contextmanager
def progress(*, done: int, total: int) -> Iterator[Callable[[], None]]:
    """Gives `advance()`, to be called when one more of `total` is done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines(done, total, say=console.print)
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda: bar.advance(task)


def _lines(done: int, total: int, *, say: Callable[[str], None]) -> Callable[[], None]:
    spoke = time.monotonic()

    def advance() -> None:
        nonlocal spoke, done
        done += 1
        if done == total or time.monotonic() - spoke > LINE_EVERY:
            spoke = time.monotonic()
            say(f"{done}/{total} prompts")

    return advance
