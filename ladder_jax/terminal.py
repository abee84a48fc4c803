"""Print lines and rich tables on standard output."""

from collections.abc import Iterable
from typing import Any

WIDTH = 120  # the minimum: a narrower terminal wraps long lines, so that no column is cut off


def show(parts: Iterable[Any]) -> None:
    """Print strings unchanged, and tables. Raises BrokenPipeError if the reader closed the pipe, as `print` does."""
    from rich.console import Console  # slow to import

    class Output(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program, with status 1
            raise BrokenPipeError

    console = Output(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
