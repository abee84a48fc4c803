"""Digests of a file's blocks. They detect a change when a block is first read, without reading the whole file."""

import hashlib
import pathlib
from collections.abc import Callable

import numpy as np

BLOCK = 2**18  # bytes
SIZE = 8  # bytes of a digest: 32 MB of digests for a terabyte


def digests(file: pathlib.Path) -> bytes:
    """The digests of the file's blocks, one after another. The last block may be shorter."""
    with file.open("rb") as content:
        return b"".join(map(_digest, iter(lambda: content.read(BLOCK), b"")))


def digests_of(content: bytes) -> bytes:
    """As `digests`, of a file's content."""
    return b"".join(_digest(content[start : start + BLOCK]) for start in range(0, len(content), BLOCK))


def count(size: int) -> int:
    """The number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK)


class Blocks:
    """Checks each block of a file once: `Blocks(digests)(start, end, read)` before bytes start..end-1 are used.

    read: a function (offset, size) -> bytes. Raises ValueError for a block that differs. Without digests, as in stores
    of earlier versions, nothing is checked.
    """

    def __init__(self, digests: bytes):
        self._digests = digests
        self._checked = np.zeros(len(digests) // SIZE, bool)

    def __call__(self, start: int, end: int, read: Callable[[int, int], bytes]) -> None:
        for block in range(start // BLOCK, min(count(end), len(self._checked))):
            if self._checked[block]:
                continue
            if _digest(read(block * BLOCK, BLOCK)) != self._digests[block * SIZE : (block + 1) * SIZE]:
                raise ValueError(f"bytes {block * BLOCK:,} to {(block + 1) * BLOCK - 1:,} are not what was written")
            self._checked[block] = True


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=SIZE).digest()
