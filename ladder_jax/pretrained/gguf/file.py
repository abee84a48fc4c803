"""A GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): its settings, and
tensors read lazily.

The header is not read by the package `gguf`: it takes 17 times as long for a vocabulary of
128k, and believes the lengths in it, where a file of 113 bytes that declares 2^40 items would fill
the memory.
Tensors are read into buffers, in blocks of rows. The file is not mapped: its pages would stay in
memory.
"""

import dataclasses
import functools
import math
import operator
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from ladder_jax.errors import UserError, needed
from ladder_jax.files import reading
from ladder_jax.pretrained.fields import Fields
from ladder_jax.pretrained.source import Shape, Stored, from_file

PLAIN = {
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that are kept. All others are quantised, and become float32, which holds their values
exactly.
"""
BLOCK = 1 << 24  # bytes of quantised rows that are read at a time: with 4 bits, 128 MiB in float32

# The types of settings by their numbers: numbers as NumPy calls them, texts, lists.
_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
_UINT32 = 4
_UINT64 = 10
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


def open_file(path: pathlib.Path) -> File:
    """Reads the header only. Raises UserError if it is not a GGUF file, is cut off, or has
    unsupported types.
    """
    where = str(path)
    try:
        with reading(where), path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"{where!r} is no pretrained model (allowed: a Hugging Face folder, a GGUF file, a checkpoint)"
                )
            return _read(_Header(file, size=path.stat().st_size), where)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise UserError(f"{where!r} is damaged or incomplete: {error}"[:300]) from None


class _Header:
    """Reads a header from its file, of `size` bytes. Raises ValueError where something ends beyond
    it.
    """

    def __init__(self, file: BinaryIO, *, size: int):
        self._file = file
        self.size = size
        self.position = file.tell()

    def take(self, size: int) -> bytes:
        self.position += size
        if self.position > self.size:
            raise ValueError("it ends within its header")
        return self._file.read(size)

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self) -> str:
        # by far the most numbers of a header: by NumPy they take several times as long
        length = int.from_bytes(self.take(8), "little")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.number(kind)
        kind = self.number(_UINT32)
        count = self.number(_UINT64)
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        return self.numbers(kind, count)


def _read(header: _Header, where: str) -> File:
    version = header.number(_UINT32)
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known")
    tensors = header.number(_UINT64)
    settings = header.number(_UINT64)
    fields = {}
    for _ in range(settings):
        name = header.text()
        fields[name] = header.value(header.number(_UINT32))
    described = {}
    for _ in range(tensors):
        name = header.text()
        shape = header.numbers(_UINT64, header.number(_UINT32))
        kind = _package().GGMLQuantizationType(header.number(_UINT32))
        offset = header.number(_UINT64)
        described[name] = tuple(reversed(shape)), kind, offset
    start = header.position
    alignment = operator.index(fields.get("general.alignment", 32))
    if alignment < 1:
        raise ValueError(f"its alignment is {alignment}")
    start += -start % alignment
    stored = {}
    kinds = set()
    for name, (shape, kind, offset) in described.items():
        if kind.name not in PLAIN and not hasattr(_package().quants, kind.name):
            raise UserError(
                f"{where!r}: {name} is of type {kind.name}, which cannot be dequantised"
            )
        stored[name], size = _stored(where, shape, kind, start + offset)
        if start + offset + size > header.size:
            raise ValueError(f"it ends before the end of {name}")
        kinds.add(kind.name)
    return File(where, fields, stored, frozenset(kinds))


def _stored(path: str, shape: Shape, kind: Any, offset: int) -> tuple[Stored, int]:
    """The tensor, and how many bytes of the file it takes."""
    dtype = PLAIN.get(kind.name)
    if dtype is None:
        *rows, row = _package().quants.quant_shape_to_byte_shape(shape, kind)
        read = functools.partial(_dequantised, path, kind, shape, row=row, offset=offset)
        return Stored(shape, np.dtype(np.float32), read), math.prod(rows) * row
    read = functools.partial(from_file, path, dtype, shape, offset=offset)
    stored = Stored(shape, dtype, read)
    return stored, stored.nbytes


def _dequantised(path: str, kind: Any, shape: Shape, *, row: int, offset: int) -> np.ndarray:
    """Values of quantised rows, each of `row` bytes."""
    count = math.prod(shape[:-1])
    out = np.empty((count, shape[-1]), np.float32)
    step = max(1, BLOCK // row)
    for start in range(0, count, step):
        rows = min(step, count - start)
        packed = from_file(path, np.uint8, (rows, row), offset=offset + start * row)
        out[start : start + rows] = _package().quants.dequantize(packed, kind)
    return out.reshape(shape)


def _package():
    with needed("GGUF files need the package gguf", extra="hf"):
        import gguf
    return gguf
