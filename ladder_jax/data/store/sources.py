"""The sources of documents, cut into parts that workers read apart from each other. What is wrong
in one is named by its file and line.
"""

import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from ladder_jax.data import json_lines
from ladder_jax.data.store import tables
from ladder_jax.errors import UserError
from ladder_jax.files import below, is_remote, on_disk, text_of

PARTS = 1024
LEAST = 2**24
"""Sources are cut into about so many parts, unless a part would be of fewer bytes. A killed worker
loses a part.
"""


class Kind(enum.StrEnum):
    TEXT = "text"  # a file is a document
    LINES = "lines"  # of JSON, each a document
    ROWS = "rows"  # of a table, each a document


ENDINGS = dict.fromkeys(json_lines.ENDINGS, Kind.LINES)
ENDINGS |= dict.fromkeys(tables.BUILDERS, Kind.ROWS)
ALLOWED = f"a text file, a folder, {', '.join(ENDINGS)} or {tables.HUB}OWNER/NAME"


@dataclasses.dataclass(frozen=True)
class File:
    """path: of a file, or the address of a data set on the Hub with its commit. size: in bytes; 0
    on the Hub.
    modified: in nanoseconds. named: by the user itself; of a folder's files, binary ones are
        skipped.
    """

    path: str
    size: int
    modified: int
    named: bool

    @property
    def kind(self) -> Kind:
        if self.path.startswith(tables.HUB):
            return Kind.ROWS
        name = self.path.lower()
        for ending, kind in ENDINGS.items():
            if name.endswith(ending):
                return kind
        return Kind.TEXT


@dataclasses.dataclass(frozen=True)
class Part:
    """Several text files; the lines of one file that begin at bytes begin..end-1; or the shards
    begin..end-1 of one table (see `tables`).
    """

    files: tuple[File, ...]
    begin: int = 0
    end: int = 0

    @property
    def kind(self) -> Kind:
        return self.files[0].kind

    @functools.cached_property
    def digest(self) -> str:
        """Changes with the part's files, their sizes and times, and its bounds."""
        files = []
        for file in self.files:
            path = file.path if is_remote(file.path) else os.path.abspath(file.path)
            files.append((path, file.size, file.modified))
        content = json.dumps([files, self.begin, self.end])
        return hashlib.sha256(content.encode()).hexdigest()[:20]


def plan(
    sources: Sequence[str], *, subset: str | None = None, split: str = "train", most: int = 2**40
) -> list[Part]:
    """The parts of all sources, in the order given; a folder's files are sorted by path.

    subset, split: of the data sets on the Hub among the sources. most: bytes in a part, about.
    Raises UserError for a source that does not exist or is named twice, and for tables without
    `datasets`.
    """
    files = [file for source in sources for file in _files(source, subset, split)]
    seen = set()
    for file in files:
        real = os.path.realpath(file.path)
        if real in seen:
            raise UserError(f"{file.path!r} is named twice")
        seen.add(real)
    total = sum(file.size for file in files)
    size = min(most, max(LEAST, total // PARTS))
    parts = []
    for kind, alike in itertools.groupby(files, key=lambda file: file.kind):
        if kind is Kind.TEXT:
            parts += _texts(alike, size)
        else:
            for file in alike:
                parts += _cut(file, size)
    return parts


def _files(source: str, subset: str | None, split: str) -> list[File]:
    if source.startswith(tables.HUB):
        address = tables.address(source, subset=subset, split=split)
        return [File(address, size=0, modified=0, named=True)]
    root = on_disk(source)
    if not root.exists():
        raise UserError(f"{source!r} does not exist ({ALLOWED})")
    files = []
    for path in below(root, data=True):
        state = path.stat()
        named = path == root
        files.append(File(str(path), state.st_size, state.st_mtime_ns, named))
    return files


def _texts(files: Iterable[File], size: int) -> list[Part]:
    together = {}
    begin = 0
    for file in files:
        together.setdefault(begin // size, []).append(file)
        begin += file.size
    return [Part(tuple(group)) for group in together.values()]


def _cut(file: File, size: int) -> list[Part]:
    """A table's part has as many shards as hold about `size` bytes; on the Hub, one shard."""
    total = file.size
    step = size
    if file.kind is Kind.ROWS:
        total = tables.shards(file.path)
        step = 1
        if file.size:
            step = max(1, size * total // file.size)
    elif file.path.lower().endswith(".gz"):  # which cannot be read from the middle
        return [Part((file,), 0, sys.maxsize)]
    bounds = [*range(0, total, step), total]
    return [Part((file,), begin, end) for begin, end in itertools.pairwise(bounds)]


def read(part: Part, *, field: str) -> Iterator[str | None]:
    """Each document's text, in order; None for a folder's file that is no text.

    Raises UserError for a line that is not a JSON object with text in `field`, and for what cannot
    be read.
    """
    if part.kind is Kind.TEXT:
        return (text_of(file.path, named=file.named) for file in part.files)
    (file,) = part.files
    if part.kind is Kind.LINES:
        return _lines(file.path, part.begin, part.end, field)
    return tables.read(file.path, part.begin, part.end, field=field, modified=file.modified)


def _lines(file: str, begin: int, end: int, field: str) -> Iterator[str]:
    for number, value in json_lines.read(file, begin, end):
        try:
            text = value[field]
            text.encode("utf-8")
        except UnicodeEncodeError:
            wrong = f"half of a surrogate pair, which is no character, in {field!r}"
        except (TypeError, KeyError, AttributeError):
            has = type(value).__name__
            if isinstance(value, dict):
                has = f"an object with {', '.join(map(repr, value))}"
                if field in value:
                    has = type(value[field]).__name__
            wrong = f"no text in {field!r} (--field names it): this is {has}"
        else:
            yield text
            continue
        raise UserError(f"{json_lines.place(file, number, begin)}: {wrong}")
