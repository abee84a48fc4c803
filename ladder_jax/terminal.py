"""What a command prints on standard output: lines and tables, as rich draws them."""

from collections.abc import Iterable
from typing import Any

WIDTH = 120  # at least; a narrower terminal wraps what is wider, which loses nothing


def show(parts: Iterable[Any]) -> None:
    """Strings as they are, and tables. Raises BrokenPipeError where nobody reads on, as `print` does."""
    from rich.console import Console  # slow to import

    class Output(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program, with status 1
            raise BrokenPipeError

    console = Output(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
