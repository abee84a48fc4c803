"""A compiler's results for one program, and their files in the cache."""

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
"""The records' folder in the cache."""


class Until(enum.Enum):
    """How far a program is compiled."""

    CODE = "code"
    SCHEDULE = "schedule"  # until the order of operations is final; without the compiler's costs and sizes


@dataclasses.dataclass(frozen=True)
class Record:
    """A compiler's results for one program; bytes are those of one device.

    hlo: text of the scheduled program.
    options: compiler options in force. launch: of the all-reduces that it hides, "chained" or "explicit".
    notices: warnings about options or settings that were dropped, with reasons.
    bytes_accessed: the compiler's count; None if it gives none.
    argument_bytes, output_bytes, alias_bytes, temporary_bytes, code_bytes: None if compiled until SCHEDULE.
    bytes_minimum: weights and cache, each read once (decode); None for other phases.
    """

    hlo: str = dataclasses.field(repr=False)
    jax: str
    compiler: str
    options: dict
    launch: str
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
    """The record at `path`; None if the file is missing or unreadable for this version."""
    try:
        with gzip.open(path, "rt") as file:
            values = json.load(file)
        record = Record(**{**values, "notices": tuple(values["notices"])})
    except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, zlib.error):
        return None
    return record if _has_declared_types(record) else None


def _has_declared_types(record: Record) -> bool:
    """Whether the fields have their declared types: a damaged file may still be valid JSON."""
    sizes = [value for name, value in vars(record).items() if name.startswith("bytes_") or name.endswith("_bytes")]
    texts = [record.hlo, record.jax, record.compiler, record.launch, *record.notices]
    numbers = [record.seconds, *(size for size in sizes if size is not None)]
    return (
        isinstance(record.options, dict)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) for number in numbers)
    )


def write(path: str | os.PathLike, record: Record) -> None:
    """Write atomically: a killed process leaves no partial record."""
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
