"""Check the header of a GGUF file against the file's length, before the package `gguf` reads it.

`gguf` does not check the lengths of lists: a file of 113 bytes that declares 2^40 items would fill the memory.
"""

import mmap
import pathlib
import struct

from ladder_jax.errors import UserError

MAX_ITEMS = 1 << 22
"""Items of all lists together, at most: the largest vocabularies have 2^18 tokens, and about as many merges."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by the type's number
_STRING, _LIST = 8, 9


def check(path: pathlib.Path) -> None:
    """Raises UserError for a damaged header and a big-endian file. `gguf` itself refuses unknown versions."""
    with path.open("rb") as file:
        start = file.read(24)
        if len(start) < 24:
            raise _damaged(path, "it ends within its header")
        version, tensors, settings = struct.unpack_from("<IQQ", start, 4)
        if version & 0xFFFF == 0:
            raise UserError(f"{str(path)!r} is big-endian, which is not supported")
        if version not in (2, 3):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                _HeaderReader(content, 24).head(tensors, settings)
            except (struct.error, ValueError) as error:
                raise _damaged(path, str(error)) from None


class _HeaderReader:
    """Steps through a header's settings. Raises ValueError or struct.error if one ends beyond the file."""

    def __init__(self, content: mmap.mmap, position: int):
        self._content, self._position, self._items = content, position, 0

    def head(self, tensors: int, settings: int) -> None:
        for _ in range(settings):
            self._skip(self._number("<Q"))  # its name
            self._value(self._number("<I"))
        if tensors > len(self._content):
            raise ValueError(f"it has no room for {tensors} tensors")

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            return self._skip(self._number("<Q"))
        if kind != _LIST:
            return self._skip(self._size(kind))
        kind, count = self._number("<I"), self._number("<Q")
        self._items += count
        if self._items > MAX_ITEMS or kind == _LIST:
            raise ValueError(f"a setting is a list of {count} items, or of lists")
        if kind != _STRING:
            return self._skip(count * self._size(kind))
        for _ in range(count):
            self._value(kind)

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise ValueError(f"a setting is of the unknown type {kind}")
        return _SIZES[kind]

    def _number(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self._content, self._position)
        self._position += struct.calcsize(form)
        return number

    def _skip(self, size: int) -> None:
        self._position += size
        if self._position > len(self._content):
            raise ValueError("it ends within its header")


def _damaged(path: pathlib.Path, reason: str) -> UserError:
    return UserError(f"{str(path)!r} is damaged or incomplete: {reason}")
