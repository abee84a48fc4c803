"""The files that documents come from, cut into parts that can be read apart."""

import dataclasses
import enum
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

from ladder_jax.errors import UserError

PART_BYTES = 2**24  # of the sources: what a worker does at once, and at most loses when it is killed


class Kind(enum.StrEnum):
    TEXT = "text"  # a file is a document
    LINES = "lines"  # of JSON, each a document
    GZIP = "gzip"  # the same, compressed
    PARQUET = "parquet"  # a row is a document


ENDINGS = {".jsonl": Kind.LINES, ".ndjson": Kind.LINES, ".jsonl.gz": Kind.GZIP, ".parquet": Kind.PARQUET}


@dataclasses.dataclass(frozen=True)
class File:
    """modified: nanoseconds. named: by the user, and not found in a folder, where what is no text is skipped."""

    path: str
    size: int
    modified: int
    named: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """Several files of text, or of one file: lines that begin at bytes begin..end-1, or row groups begin..end-1."""

    kind: Kind
    files: tuple[File, ...]
    begin: int
    end: int
    size: int  # in bytes, about

    @functools.cached_property
    def digest(self) -> str:
        """Tells this part, as its files are now, from others."""
        files = [(str(pathlib.Path(file.path).absolute()), file.size, file.modified) for file in self.files]
        return hashlib.sha256(json.dumps([self.kind, files, self.begin, self.end]).encode()).hexdigest()[:20]


def plan(sources: Sequence[str], *, part_bytes: int = PART_BYTES) -> list[Part]:
    """All parts of all sources, in their order; a folder's files in the order of their paths.

    Raises UserError for a source that is not there, or is named twice, or for Parquet without pyarrow.
    """
    parts, texts = [], []

    def end_texts():
        if texts:
            parts.append(Part(Kind.TEXT, tuple(texts), 0, 0, sum(file.size for file in texts)))
            texts.clear()

    for file in _files(sources):
        kind = kind_of(file.path)
        if kind is Kind.TEXT:
            texts.append(file)
            if sum(one.size for one in texts) >= part_bytes:
                end_texts()
            continue
        end_texts()
        if kind is Kind.LINES:
            bounds = [*range(0, file.size, part_bytes), file.size]
            parts += [Part(kind, (file,), a, b, b - a) for a, b in zip(bounds, bounds[1:])]
        elif kind is Kind.GZIP:
            parts.append(Part(kind, (file,), 0, 0, file.size))
        else:
            parts += _row_groups(file, part_bytes)
    end_texts()
    return parts


def kind_of(path: str) -> Kind:
    return next((kind for ending, kind in ENDINGS.items() if path.lower().endswith(ending)), Kind.TEXT)


def _files(sources: Sequence[str]) -> Iterable[File]:
    seen = set()
    for source in sources:
        path = pathlib.Path(source).expanduser()
        if not path.exists():
            raise UserError(f"{source!r} does not exist (a text file, a folder, .jsonl, .jsonl.gz or .parquet)")
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in found:
            real = file.resolve()
            if real in seen:
                raise UserError(f"{str(file)!r} is named twice")
            seen.add(real)
            state = file.stat()
            yield File(str(file), state.st_size, state.st_mtime_ns, named=file is path)


def _row_groups(file: File, part_bytes: int) -> list[Part]:
    groups = parquet(file.path).metadata
    parts, begin, size = [], 0, 0
    for index in range(groups.num_row_groups):
        size += groups.row_group(index).total_byte_size
        if size >= part_bytes or index + 1 == groups.num_row_groups:
            parts.append(Part(Kind.PARQUET, (file,), begin, index + 1, size))
            begin, size = index + 1, 0
    return parts


def parquet(path: str):
    """The file, opened by pyarrow. Raises UserError where that is missing, or the file is damaged."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install 'ladder-jax[data]'") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a Parquet file, or a damaged one: {' '.join(str(error).split())}") from None
