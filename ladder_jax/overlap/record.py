"""What a compiler said about a program, and the store of it: compiling again would say the same."""

import contextlib
import dataclasses
import enum
import gzip
import json
import os
import pathlib
import tempfile
import zlib

FOLDER = "schedules"
"""Of the cache."""


class Until(enum.Enum):
    """How far a program is compiled."""

    CODE = "code"
    SCHEDULE = "schedule"  # the order of operations is final; the compiler's own costs and sizes are not known


@dataclasses.dataclass(frozen=True)
class Record:
    """hlo: the scheduled program. Bytes are those of one device; bytes_accessed None where unknown.

    The sizes from argument_bytes to code_bytes are None for a program compiled until SCHEDULE.

    options: compiler options in force; notices: what was dropped or given up, and why.
    bytes_minimum: weights and cache read once (decode), None for other phases.
    """

    hlo: str
    jax: str
    compiler: str
    options: dict
    notices: tuple[str, ...]
    seconds: float
    bytes_accessed: float | None
    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temporary_bytes: int | None
    code_bytes: int | None
    bytes_minimum: int | None

    @property
    def bytes_per_device(self) -> int | None:
        """At the peak: arguments, temporaries, and the outputs that do not reuse an argument's memory."""
        if self.temporary_bytes is None:
            return None
        outputs = self.output_bytes - self.alias_bytes
        return self.argument_bytes + self.temporary_bytes + outputs + self.code_bytes


def read(path: str | os.PathLike) -> Record | None:
    """The record at `path`; None where there is none, or none that this version can read."""
    try:
        with gzip.open(path, "rt") as file:
            values = json.load(file)
        found = Record(**{**values, "notices": tuple(values["notices"])})
    except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, zlib.error):
        return None
    return found if _is_sound(found) else None


def _is_sound(found: Record) -> bool:
    """Of the types that are declared: what a disk has damaged may still be JSON."""
    sizes = [value for name, value in vars(found).items() if name.startswith("bytes_") or name.endswith("_bytes")]
    texts = [found.hlo, found.jax, found.compiler, *found.notices]
    numbers = [found.seconds, *(size for size in sizes if size is not None)]
    return (
        isinstance(found.options, dict)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) for number in numbers)
    )


def write(path: str | os.PathLike, record: Record) -> None:
    """Atomically: a killed process leaves no half of a record."""
    path = pathlib.Path(path)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", compresslevel=5) as file:
            json.dump(dataclasses.asdict(record), file)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
