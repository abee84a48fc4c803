"""The objects of JSON lines files, each with its file and line for messages."""

import gzip
import json
import pathlib
import zlib
from collections.abc import Iterator

from ladder_jax.errors import UserError

ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz")


def read(path: str) -> Iterator[tuple[str, dict]]:
    """(FILE:LINE, the object) of a file, or of a folder's files in the order of their paths. Empty lines are none.

    Raises UserError for what is not there, cannot be read, or is no JSON object.
    """
    root = pathlib.Path(path).expanduser()
    if not root.exists():
        raise UserError(f"data.path={path!r} does not exist (a JSON lines file, or a folder of them)")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.name.endswith(ENDINGS))
    if not files:
        raise UserError(f"data.path={path!r} holds no file that ends in {', '.join(ENDINGS)}")
    for file in files:
        yield from _objects(file)


def _objects(file: pathlib.Path) -> Iterator[tuple[str, dict]]:
    opened = gzip.open if file.name.endswith(".gz") else open
    number = 0
    try:
        with opened(file, "rb") as source:
            for number, line in enumerate(source, start=1):
                if line.strip():
                    yield f"{file}:{number}", _object(line, f"{file}:{number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{file}:{number + 1}: the gzip file is damaged or incomplete: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror or error}") from None


def _object(line: bytes, where: str) -> dict:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"not JSON: {error}"
        raise UserError(f"{where}: {reason}") from None
    if not isinstance(found, dict):
        raise UserError(f"{where}: not a JSON object but {type(found).__name__}")
    return found
