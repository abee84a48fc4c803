"""A GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): its settings, and
tensors read lazily.

The header is not read by the package `gguf`, which believes the lengths in it: a file of 113 bytes
that declares 2^40 items would fill the memory. Tensors are read into buffers, in blocks of rows.
The file is not mapped: its pages would stay in memory.
"""

import dataclasses
import functools
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ladder_jax.errors import UserError, needed
from ladder_jax.pretrained.fields import Fields
from ladder_jax.pretrained.source import Stored, from_file

PLAIN = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that are kept. All others are quantised, and become float32, which holds their values
exactly.
"""
BLOCK = 1 << 24  # bytes of quantised rows that are read at a time: with 4 bits, 128 MiB in float32
MAX_ITEMS = 1 << 22
"""Items of all lists together, at most: the largest vocabularies have 2^18 tokens, and about as
many merges.
"""

# The types of settings by their numbers: numbers as `struct` calls them, texts, lists.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT = 8
_LIST = 9


@dataclasses.dataclass(frozen=True)
class File:
    """fields: the settings by name, each a plain value or a list. tensors: by name, [out, in] as
    Hugging Face's matrices. kinds: the tensors' types, such as "Q4_1".
    """

    path: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    kinds: frozenset[str] = frozenset()

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A setting. Raises UserError if it is of another type, as the format allows."""
        return Fields(self.fields, repr(self.path))(name, kind, default)

    def items[T](self, name: str, *kinds: type[T]) -> list[T]:
        """A setting that is a list; empty if it is missing."""
        found = self.get(name, list, [])
        if not all(isinstance(item, kinds) for item in found):
            raise UserError(
                f"{self.path!r}: {name} is not a list of {' or '.join(kind.__name__ for kind in kinds)}"
            )
        return found


def open_file(path: pathlib.Path) -> File:
    """Reads the header only. Raises UserError if it is not a GGUF file, is cut off, or has
    unsupported types.
    """
    where = str(path)
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"{where!r} is no pretrained model (allowed: a Hugging Face folder, a GGUF file, a checkpoint)"
                )
            header = _Header(file, size=path.stat().st_size)
            version = header.number("I")
            if version & 0xFFFF == 0:
                raise UserError(f"{where!r} is big-endian, which is not supported")
            if version not in (2, 3):
                raise ValueError(f"version {version} is not known")
            tensors = header.number("Q")
            settings = header.number("Q")
            fields = _by_name(
                (header.text(), header.value(header.number("I"))) for _ in range(settings)
            )
            found = _by_name(header.tensor() for _ in range(tensors))
            start = file.tell()
            alignment = fields.get("general.alignment", 32)
            if not isinstance(alignment, int) or alignment < 1:
                raise ValueError(f"its tensors are aligned to {alignment} bytes")
            start += -start % alignment
            stored = {
                name: _stored(where, name, *about, start=start, end=header.size)
                for name, about in found.items()
            }
    except OSError as error:
        raise UserError(f"cannot read {where!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{where!r} is damaged or incomplete: {error}"[:300]) from None
    kinds = frozenset(_package().GGMLQuantizationType(kind).name for _, kind, _ in found.values())
    return File(where, fields, stored, kinds)


class _Header:
    """Reads a header from its file. Raises ValueError where something ends beyond the file, of
    `size` bytes.
    """

    def __init__(self, file: BinaryIO, *, size: int):
        self._file = file
        self.size = size
        self._items = 0

    def number(self, form: str) -> int | float | bool:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self._take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(_form(kind))
        kind = self.number("I")
        count = self.number("Q")
        self._items += count
        if self._items > MAX_ITEMS or kind == _LIST:
            raise ValueError(f"a setting is a list of {count} items, or of lists")
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        form = f"<{count}{_form(kind)}"
        content = self._take(struct.calcsize(form))
        return list(struct.unpack(form, content))

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """Name, and (shape, type, offset)."""
        name = self.text()
        count = self.number("I")
        shape = tuple(self.number("Q") for _ in range(count))
        kind = self.number("I")
        offset = self.number("Q")
        return name, (shape[::-1], kind, offset)

    def _take(self, size: int) -> bytes:
        if size > self.size - self._file.tell():
            raise ValueError("it ends within its header")
        return self._file.read(size)


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a setting is of the unknown type {kind}")
    return _NUMBERS[kind]


def _by_name(pairs: Any) -> dict[str, Any]:
    found = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it holds {name} twice")
        found[name] = value
    return found


def _stored(
    path: str, name: str, shape: tuple[int, ...], number: int, offset: int, *, start: int, end: int
) -> Stored:
    package = _package()
    kind = package.GGMLQuantizationType(number)
    called = kind.name
    allowed = (*PLAIN, *_quantised())
    if called not in allowed:
        names = ", ".join(allowed)
        raise UserError(
            f"{path!r}: {name} is of type {called}, which is not supported (allowed: {names})"
        )
    if not shape or min(shape) < 1:
        raise UserError(f"{path!r}: {name} has no values, its shape is {shape}")
    values, size = package.GGML_QUANT_SIZES[kind]  # of a block: how many values, in how many bytes
    columns = shape[-1]
    if columns % values:
        raise ValueError(f"the rows of {name}, of {columns} values, are no blocks of {called}")
    offset += start
    length = math.prod(shape) // values * size
    if offset + length > end:
        raise ValueError(f"it ends before the end of {name}")
    if called in PLAIN:
        dtype = PLAIN[called]
        read = functools.partial(from_file, path, dtype, shape, offset=offset)
        return Stored(shape, dtype, read)
    row = columns // values * size
    read = functools.partial(_dequantised, path, kind, shape, row=row, offset=offset)
    return Stored(shape, np.dtype(np.float32), read)


def _dequantised(
    path: str, kind: Any, shape: tuple[int, ...], *, row: int, offset: int
) -> np.ndarray:
    """Values of quantised rows, each of `row` bytes."""
    count = math.prod(shape[:-1])
    out = np.empty((count, shape[-1]), np.float32)
    step = max(1, BLOCK // row)
    for start in range(0, count, step):
        rows = min(step, count - start)
        packed = from_file(path, np.uint8, (rows, row), offset=offset + start * row)
        out[start : start + rows] = _package().quants.dequantize(packed, kind)
    return out.reshape(shape)


@functools.cache
def _quantised() -> tuple[str, ...]:
    """The types that the package can dequantise."""
    package = _package()
    kinds = (kind.name for kind in package.GGMLQuantizationType)
    return tuple(kind for kind in kinds if hasattr(package.quants, kind) and kind not in PLAIN)


def _package():
    with needed("GGUF files need the package gguf", extra="hf"):
        import gguf
    return gguf
