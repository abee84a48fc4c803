"""The sources of documents, cut into parts that workers read independently."""

import dataclasses
import enum
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

from ladder_jax.data.store import rows
from ladder_jax.errors import UserError

PART_BYTES = 2**24  # of the sources: the size of a part, and the most that a killed worker loses


class Kind(enum.StrEnum):
    TEXT = "text"  # a file is a document
    LINES = "lines"  # of JSON, each a document
    GZIP = "gzip"  # the same, compressed
    ROWS = "rows"  # of a table, each a document


ENDINGS = {".jsonl": Kind.LINES, ".ndjson": Kind.LINES, ".jsonl.gz": Kind.GZIP} | dict.fromkeys(rows.ENDINGS, Kind.ROWS)
ALLOWED = f"a text file, a folder, {', '.join(ENDINGS)} or {rows.HUB}OWNER/NAME"


@dataclasses.dataclass(frozen=True)
class File:
    """path: of a file, or the address of a data set on the Hub with its commit. size: in bytes; 0 on the Hub.
    modified: in nanoseconds. named: by the user itself; of a folder's files, binary ones are skipped.
    """

    path: str
    size: int
    modified: int
    named: bool

    @property
    def on_hub(self) -> bool:
        return self.path.startswith(rows.HUB)


@dataclasses.dataclass(frozen=True)
class Part:
    """Several text files; the lines of one file that begin at bytes begin..end-1; or the shards begin..end-1 of one
    table (see `rows`)."""

    kind: Kind
    files: tuple[File, ...]
    begin: int
    end: int
    size: int  # in bytes, about

    @functools.cached_property
    def digest(self) -> str:
        """Changes with the part's files, their sizes and times, and its bounds."""
        path = lambda file: file.path if file.on_hub else str(pathlib.Path(file.path).absolute())
        files = [(path(file), file.size, file.modified) for file in self.files]
        return hashlib.sha256(json.dumps([self.kind, files, self.begin, self.end]).encode()).hexdigest()[:20]


def plan(
    sources: Sequence[str], *, subset: str | None = None, split: str = "train", part_bytes: int = PART_BYTES
) -> list[Part]:
    """The parts of all sources, in the order given; a folder's files are sorted by path.

    subset, split: of the data sets on the Hub among the sources.
    Raises UserError for a source that does not exist or is named twice, and for tables without `datasets`.
    """
    parts, texts = [], []

    def end_texts():
        if texts:
            parts.append(Part(Kind.TEXT, tuple(texts), 0, 0, sum(file.size for file in texts)))
            texts.clear()

    for file in _files(sources, subset, split):
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
            parts += _tables(file, part_bytes)
    end_texts()
    return parts


def kind_of(path: str) -> Kind:
    if path.startswith(rows.HUB):
        return Kind.ROWS
    return next((kind for ending, kind in ENDINGS.items() if path.lower().endswith(ending)), Kind.TEXT)


def _files(sources: Sequence[str], subset: str | None, split: str) -> Iterable[File]:
    seen = set()
    for source in sources:
        path = pathlib.Path(source).expanduser()
        if source.startswith(rows.HUB):
            found = [File(rows.address(source, subset=subset, split=split), 0, 0, named=True)]
        elif not path.exists():
            raise UserError(f"{source!r} does not exist ({ALLOWED})")
        else:
            paths = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
            states = [(p, p.stat()) for p in paths]
            found = [File(str(p), state.st_size, state.st_mtime_ns, named=p is path) for p, state in states]
        for file in found:
            real = file.path if file.on_hub else pathlib.Path(file.path).resolve()
            if real in seen:
                raise UserError(f"{file.path!r} is named twice")
            seen.add(real)
            yield file


def _tables(file: File, part_bytes: int) -> list[Part]:
    """A part has as many shards as hold about `part_bytes`; on the Hub, one shard."""
    count = rows.shards(file.path)
    together = 1 if file.on_hub else max(1, part_bytes * count // max(1, file.size))
    bounds = [*range(0, count, together), count]
    return [Part(Kind.ROWS, (file,), a, b, file.size * (b - a) // count) for a, b in zip(bounds, bounds[1:])]
