"""Lines and tables on standard output, no wider than the terminal; on standard error notices and
the progress of a long command, a bar on a terminal, else a line every few seconds.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from ladder_jax.errors import printable

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines
WIDTH = 120  # of tables where there is no terminal and COLUMNS is not set
GAP = 2  # spaces between columns, if there is room
LINE_EVERY = 10.0  # seconds between lines of progress, if standard error is no terminal

Say = Callable[[str], None]  # takes a line
Update = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under `columns`. left: the columns that are not justified to the right, where
    there are numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def lines(self, width: int = WIDTH) -> list[str]:
        """At most `width` wide: first the heads are wrapped, then the widest columns, at spaces and
        hyphens.
        """
        widths = []
        heads = []  # with heads wrapped
        least = []  # with cells wrapped
        for column in zip(self.columns, *self.rows):
            words = [word for cell in column for word in _words(cell)]
            least.append(max(map(len, words), default=0))
            widths.append(max(map(len, column)))
            heads.append(max(least[-1], *map(len, column[1:] or column)))
        gap = GAP if sum(heads) + GAP * (len(heads) - 1) <= width else 1
        total = lambda: sum(widths) + gap * (len(widths) - 1)
        for floor in (heads, least):
            while total() > width and widths != floor:
                wide = [number for number, one in enumerate(widths) if one > floor[number]]
                widest = max(wide, key=widths.__getitem__)
                widths[widest] -= 1
        head, *body = (self._row(row, widths, " " * gap) for row in (self.columns, *self.rows))
        return [*head, "─" * total(), *itertools.chain(*body)]

    def _row(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> Iterator[str]:
        wrapped = [
            textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            aligned = [
                part.ljust(width) if column in self.left else part.rjust(width)
                for part, width, column in zip(parts, widths, self.columns)
            ]
            yield gap.join(aligned).rstrip()


def _words(cell: str) -> list[str]:
    """The parts of a cell that `textwrap` does not break."""
    return textwrap.wrap(cell, 1, break_long_words=False)


def show(parts: Iterable[str | Table]) -> None:
    """Print lines and tables. On a terminal long lines are wrapped at words, but commands are left
    to be copied.
    """
    columns = shutil.get_terminal_size((0, 0)).columns
    for part in parts:
        if isinstance(part, Table):
            lines = ["", *part.lines(columns or WIDTH), ""]
        elif not columns or part.startswith("ladder-jax "):
            lines = [part]
        else:
            # "memory    ", under whose text the lines go on
            label = re.match(r"\w+ {2,}|", part)[0]
            lines = [
                textwrap.fill(
                    part, columns, subsequent_indent=" " * len(label), break_on_hyphens=False
                )
            ]
        print(*map(printable, lines), sep="\n")


def answer(result: Any, *, as_json: bool, out: str | None = None) -> None:
    """Print a command's result, its `as_dict()` as JSON or its `lines()`, and write the JSON to the
    file `out`.

    Printed before it is written: the disk may be full, and making the result again takes long.
    """
    text = json.dumps(result.as_dict())
    try:
        if as_json:
            print(text)
        else:
            show(result.lines())
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head`: the files that were asked for are written all the same
        give_up(sys.stdout)
    if out is not None:
        from ladder_jax import files

        files.write(pathlib.Path(out), [f"{text}\n".encode()])


def give_up(stream: TextIO) -> None:
    """Discards what is still to be written to it, also what Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Notices:
    """Standard error, whether or not anybody reads that still: a pipe's reader or a terminal may be
    gone before a long run ends, and a log's disk be full.
    """

    def __init__(self):
        self._stream = sys.stderr

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            give_up(self._stream)


def say(line: str) -> None:
    """Print it on standard error."""
    clean = line.replace("\n", "").isprintable()
    Notices().write(f"{line if clean else printable(line)}\n")


def generated(text: str) -> str:
    """A model's text for a terminal: with control characters escaped, which a model may write."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


@contextlib.contextmanager
def progress(
    total: int,
    *,
    done: int = 0,
    label: str | None = "{done}/{total}",
    say: Say = say,
) -> Iterator[Update]:
    """Yields `update(done, text)`, which shows that `done` of `total` steps are finished, and
    `text` beside that.

    label: the format of the two numbers, such as "step {done}/{total}"; None shows nothing.
    say: prints a line where there is no bar (default: on standard error).
    """
    if label is None:
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=Notices(), highlight=False)
    label_of = lambda done: label.format(done=done, total=total)
    if not console.is_terminal:
        yield _progress_lines(total, done, label_of, say)
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


def _progress_lines(total: int, first: int, label_of: Callable[[int], str], say: Say) -> Update:
    start = last_line = time.monotonic()

    def update(done: int, text: str) -> None:
        nonlocal last_line
        now = time.monotonic()
        if done < total and now - last_line <= LINE_EVERY:
            return
        last_line = now
        line = f"{label_of(done)}  {text}".rstrip()
        if first < done < total:
            left = (now - start) / (done - first) * (total - done)
            line += f"  {left:,.0f} s left"
        say(line)

    return update
