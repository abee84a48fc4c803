"""Whether the head of a GGUF file fits into the file, before the package `gguf` makes lists of what it counts.

That takes a list's number of items on trust: 113 bytes that declare 2^40 of them fill the memory.
"""

import mmap
import pathlib
import struct

from ladder_jax.errors import UserError

MOST = 1 << 22
"""Items in lists, all together: the largest vocabularies have 2^18 tokens, and about as many merges."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by the type's number
_STRING, _LIST = 8, 9


def check(path: pathlib.Path) -> None:
    """Raises UserError where it does not fit, and for a file that is big-endian; other versions are left to `gguf`."""
    with path.open("rb") as file:
        begin = file.read(24)
        if len(begin) < 24:
            raise _damaged(path, "it ends within its head")
        version, tensors, settings = struct.unpack_from("<IQQ", begin, 4)
        if version & 0xFFFF == 0:
            raise UserError(f"{str(path)!r} is big-endian, which is not supported")
        if version not in (2, 3):
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                _Walk(content, 24).head(tensors, settings)
            except (struct.error, ValueError) as error:
                raise _damaged(path, str(error)) from None


class _Walk:
    """Over the settings of a head; ValueError or struct.error for the first that ends outside of the file."""

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
        if self._items > MOST or kind == _LIST:
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
        (found,) = struct.unpack_from(form, self._content, self._position)
        self._position += struct.calcsize(form)
        return found

    def _skip(self, size: int) -> None:
        self._position += size
        if self._position > len(self._content):
            raise ValueError("it ends within its head")


def _damaged(path: pathlib.Path, why: str) -> UserError:
    return UserError(f"{str(path)!r} is damaged or incomplete: {why}")
