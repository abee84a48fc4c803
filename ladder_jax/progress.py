"""Progress of a long command, on standard error: a bar on a terminal, else a line every few
seconds.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

LINE_EVERY = 10.0  # seconds between lines, if standard error is no terminal

Update = Callable[[int, str], None]


@contextlib.contextmanager
def progress(
    total: int,
    *,
    done: int = 0,
    label: str = "{done}/{total}",
    say: Callable[[str], None] | None = None,
) -> Iterator[Update]:
    """Yields `update(done, text)`, which shows that `done` of `total` steps are finished, and
    `text` beside that.

    label: the format of the two numbers, such as "step {done}/{total}".
    say: prints a line where there is no bar (default: on standard error).
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    label_of = lambda done: label.format(done=done, total=total)
    if not console.is_terminal:
        yield _lines(
            total,
            done,
            label_of,
            say or (lambda line: console.print(line, markup=False, soft_wrap=True)),
        )
        return
    count, message = (
        TextColumn(f"{{task.{field}}}", markup=False)
        for field in ("description", "fields[message]")
    )
    columns = (count, BarColumn(bar_width=16), message, TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label_of(done), total=total, completed=done, message="")
        yield lambda done, text: bar.update(
            task, description=label_of(done), completed=done, message=text
        )


def _lines(
    total: int, start: int, label_of: Callable[[int], str], say: Callable[[str], None]
) -> Update:
    start_time = last_line = time.monotonic()

    def update(done: int, text: str) -> None:
        nonlocal last_line
        now = time.monotonic()
        if done < total and now - last_line <= LINE_EVERY:
            return
        last_line = now
        left = (
            f"{(now - start_time) / (done - start) * (total - done):,.0f} s left"
            if start < done < total
            else ""
        )
        say("  ".join(part for part in (label_of(done), text, left) if part))

    return update
