"""Read JSON lines files, plain or compressed with gzip. Errors name the file and the line."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from ladder_jax.errors import UserError

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz")


def read(file: str | pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each line that is not empty; numbers count from 1.

    Raises UserError for a line that is not JSON, and for a file that cannot be read or is damaged.
    """
    open_file = gzip.open if str(file).endswith(".gz") else open
    number = 0
    try:
        with open_file(file, "rb") as source:
            for number, line in enumerate(source, start=1):
                if line.strip():
                    yield number, parse(line, where=lambda: f"{file}:{number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{file}:{number + 1}: the gzip file is damaged or incomplete: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror or error}") from None


def parse(line: bytes, *, where: Callable[[], str]) -> Any:
    """The value of a line of JSON. where: returns the line's file and number, for the error message."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"not JSON: {error}"
        raise UserError(f"{where()}: {reason}") from None
