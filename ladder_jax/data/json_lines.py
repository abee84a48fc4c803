"""Read JSON lines files, plain or compressed with gzip. Errors name the file and the line."""

import gzip
import json
import pathlib
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from ladder_jax.errors import UserError
from ladder_jax.files import on_disk, reason

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz")


def read(
    file: str | pathlib.Path, begin: int = 0, end: int = sys.maxsize
) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of each line that is not empty; numbers count from 1.

    begin, end: read the lines whose first byte is in begin..end-1, and count from the first of
    them; `begin` is 0 for a compressed file. Raises UserError for a line that is not JSON, and for
    a file that cannot be read or is damaged.
    """
    open_file = open
    if str(file).lower().endswith(".gz"):
        open_file = gzip.open
    number = 0
    try:
        with open_file(file, "rb") as source:
            position = 0
            if begin:
                # What is left of a line that began before belongs to the lines before.
                position = source.seek(begin - 1)
                position += len(source.readline())
            for number, line in enumerate(source, start=1):
                if position >= end:
                    return
                position += len(line)
                if line.strip():
                    yield number, json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place(file, number, begin)}: not JSON: {error}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {str(file)!r}: {reason(error)}") from None


def parsed[T](file: str, parse: Callable[[Any, int, int], T], *, what: str) -> list[T]:
    """`parse(value, number, index)` of each line that is not empty; `index` counts these from 0.

    Raises UserError, with the line's number, for what `read` or `parse` refuses, for a text that
    `parse` cannot encode, and where there is no line: the file holds no `what`.
    """
    found = []
    for number, value in read(on_disk(file)):
        try:
            found.append(parse(value, number, len(found)))
        except UserError as error:
            raise UserError(f"{file}:{number}: {error}") from None
        except UnicodeEncodeError:
            half = "half of a surrogate pair, which is no character"
            raise UserError(f"{file}:{number}: {half}") from None
    if not found:
        raise UserError(f"{file!r} holds no {what}")
    return found


def place(file: str | pathlib.Path, number: int, begin: int) -> str:
    """ "FILE:LINE" of the line that `read` counted from `begin`. It reads what is before, so it is
    for messages.
    """
    if begin:
        with open(file, "rb") as source:
            while source.tell() < begin and source.readline():
                number += 1
    return f"{file}:{number}"
