"""The documents of a part, as text. What is wrong is named by its file and line."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from ladder_jax.data import json_lines
from ladder_jax.data.store import rows
from ladder_jax.data.store.sources import File, Kind, Part
from ladder_jax.errors import UserError


def read(part: Part, *, field: str) -> Iterator[str | None]:
    """Each document's text, in order; None for a folder's file that is no text.

    Raises UserError for a line that is not a JSON object with text in `field`, and for what cannot be read.
    """
    if part.kind is Kind.TEXT:
        return (_text(file) for file in part.files)
    (file,) = part.files
    if part.kind is Kind.LINES:
        return _lines(file, part.begin, part.end, field)
    if part.kind is Kind.GZIP:
        return (
            _text_in(found, field, lambda at=number: f"{file.path}:{at}")
            for number, found in json_lines.read(file.path)
        )
    return rows.read(file.path, part.begin, part.end, field=field, modified=file.modified)


def _text(file: File) -> str | None:
    try:
        return pathlib.Path(file.path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file.path!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        if file.named:
            raise UserError(f"{file.path}: not UTF-8 text, at byte {error.start}") from None
        return None


def _lines(file: File, begin: int, end: int, field: str) -> Iterator[str]:
    """Of the lines that begin within begin..end."""
    try:
        with open(file.path, "rb") as source:
            if begin:
                source.seek(begin - 1)
                source.readline()  # what is left of a line that began before
            while (position := source.tell()) < end and (line := source.readline()):
                if line.strip():
                    where = lambda at=position: f"{file.path}:{_number(file.path, at)}"
                    yield _text_in(json_lines.parse(line, where=where), field, where)
    except OSError as error:
        raise UserError(f"cannot read {file.path!r}: {error.strerror}") from None


def _number(path: str, position: int) -> int:
    """Of the line that begins there, from 1. Read again only where something is wrong."""
    with open(path, "rb") as source:
        count = 1
        while position > 0 and (block := source.read(min(position, 2**20))):
            count, position = count + block.count(b"\n"), position - len(block)
        return count


def _text_in(found: Any, field: str, where: Callable[[], str]) -> str:
    if not isinstance(found, dict) or not isinstance(found.get(field), str):
        has = f"an object with {', '.join(map(repr, found))}" if isinstance(found, dict) else type(found).__name__
        raise UserError(f"{where()}: no text in {field!r} (--field names it): this is {has}")
    if not _encodes(found[field]):
        raise UserError(f"{where()}: half of a surrogate pair, which is no character, in {field!r}")
    return found[field]


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
