"""Read the objects of JSON lines files, each with its file and line for error messages."""

import pathlib
from collections.abc import Iterator

from ladder_jax.data import json_lines
from ladder_jax.errors import UserError


def read(path: str) -> Iterator[tuple[str, dict]]:
    """Yields ("FILE:LINE", object) of a file, or of a folder's files in the order of their paths. Skips empty lines.

    Raises UserError if `path` does not exist or cannot be read, and for a line that is not a JSON object.
    """
    root = pathlib.Path(path).expanduser()
    if not root.exists():
        raise UserError(f"data.path={path!r} does not exist (a JSON lines file, or a folder of them)")
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.name.endswith(json_lines.ENDINGS))
    if not files:
        raise UserError(f"data.path={path!r} holds no file that ends in {', '.join(json_lines.ENDINGS)}")
    for file in files:
        for number, value in json_lines.read(file):
            if not isinstance(value, dict):
                raise UserError(f"{file}:{number}: not a JSON object but {type(value).__name__}")
            yield f"{file}:{number}", value
