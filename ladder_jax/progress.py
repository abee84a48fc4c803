"""How far a long command is, on standard error: a bar on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Callable, Iterator

LINE_EVERY = 10.0  # seconds between lines where there is no terminal

Update = Callable[[int, str], None]


@contextlib.contextmanager
def progress(
    total: int, *, done: int = 0, label: str = "{done}/{total}", say: Callable[[str], None] | None = None
) -> Iterator[Update]:
    """Gives `update(done, text)`: so many of `total` are done, and `text` is news of it.

    label: words around the two numbers, "step {done}/{total}"; say: prints the lines (default: on standard error).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    named = lambda done: label.format(done=done, total=total)
    if not console.is_terminal:
        yield _lines(total, done, named, say or (lambda line: console.print(line, markup=False, soft_wrap=True)))
        return
    words = (TextColumn("{task.description}", markup=False), TextColumn("{task.fields[news]}", markup=False))
    columns = (words[0], BarColumn(bar_width=16), words[1], TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(named(done), total=total, completed=done, news="")
        yield lambda done, text: bar.update(task, description=named(done), completed=done, news=text)


def _lines(total: int, start: int, named: Callable[[int], str], say: Callable[[str], None]) -> Update:
    began = spoke = time.monotonic()

    def update(done: int, text: str) -> None:
        nonlocal spoke
        now = time.monotonic()
        if done < total and now - spoke <= LINE_EVERY:
            return
        spoke = now
        left = f"{(now - began) / (done - start) * (total - done):,.0f} s left" if start < done < total else ""
        say("  ".join(part for part in (named(done), text, left) if part))

    return update
