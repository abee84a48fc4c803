"""The documents of a part, as text. What is wrong is named by its file and line."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator

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
        return _gzip(file, field)
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
                    yield _document(line, field, lambda at=position: f"{file.path}:{_number(file.path, at)}")
    except OSError as error:
        raise UserError(f"cannot read {file.path!r}: {error.strerror}") from None


def _number(path: str, position: int) -> int:
    """Of the line that begins there, from 1. Read again only where something is wrong."""
    with open(path, "rb") as source:
        count = 1
        while position > 0 and (block := source.read(min(position, 2**20))):
            count, position = count + block.count(b"\n"), position - len(block)
        return count


def _gzip(file: File, field: str) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(file.path, "rb") as source:
            for number, line in enumerate(source, start=1):
                if line.strip():
                    yield _document(line, field, lambda at=number: f"{file.path}:{at}")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file.path}:{number + 1}: the gzip file is damaged or incomplete: {error}") from None


def _document(line: bytes, field: str, where) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"not JSON: {error}"
        raise UserError(f"{where()}: {reason}") from None
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
