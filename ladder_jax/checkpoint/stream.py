"""Write a checkpoint's parameters piece by piece: those of a model that is too large for the host's memory.

A Store saves arrays that are in memory. Here a chunk holds a part of one layer, so that pieces can be written and read
separately.
"""

import concurrent.futures
import hashlib
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import tensorstore

from ladder_jax.checkpoint import arrays
from ladder_jax.nn.parameter import STACKS

CHUNK = 1 << 25  # bytes that are copied or compressed at a time, at most


class Stream:
    """Writes one item of a checkpoint: `stream.put("layers/mlp/up", values, layer=3)` for each array, then `finish()`.

    arrays: the shape and dtype of each array by name; arrays of layers are stacked, [L, ...].
    `folder` must not exist yet. A failed write raises tensorstore's ValueError or OSError.

    Use it in a `with` block. All disk access runs in a thread, where the exception of a signal handler cannot interrupt
    it; it has ended when the block ends. A write that ran on would create the folder again after its removal.
    """

    def __init__(self, folder: pathlib.Path, arrays: Mapping[str, jax.ShapeDtypeStruct]):
        self._disk = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ladder_jax stream")
        self._on_disk(lambda: None)  # starts the thread now, so that __exit__ always waits for it
        try:
            folder.mkdir(parents=True)
            self.folder, self.arrays = folder, dict(arrays)
            self._digests: dict[tuple[str, int | None, int], bytes] = {}
            self._open_all()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self._disk.shutdown(wait=True, cancel_futures=True)

    def put(self, name: str, values: np.ndarray, *, layer: int | None = None) -> None:
        """Write an array, or one layer of it. Returns when it is on the disk."""
        target = self._part(name, layer)
        if tuple(target.shape) != values.shape:
            raise ValueError(f"{name} is {values.shape}, not {tuple(target.shape)}")
        dtype = self.arrays[name].dtype
        rows = _rows(values.shape, dtype)
        for start in range(0, len(values), rows):
            piece = np.ascontiguousarray(values[start : start + rows], dtype)
            self._on_disk(lambda: target[start : start + len(piece)].write(piece).result())
            self._digests[name, layer, start] = _digest(piece)

    @property
    def count(self) -> int:
        """The number of pieces written."""
        return len(self._digests)

    def finish(self) -> None:
        """Write Orbax's description of the arrays."""
        arrays.describe(self.folder, self.arrays)

    def differences(self) -> Iterator[str | None]:
        """Reads every piece back. Yields None for each that equals what was written, else the array's name."""
        self._open_all()
        for (name, layer, start), digest in self._digests.items():
            target = self._part(name, layer)
            stop = min(start + _rows(target.shape, self.arrays[name].dtype), target.shape[0])
            stored = _digest(np.ascontiguousarray(self._on_disk(lambda: target[start:stop].read().result())))
            yield None if stored == digest else name if layer is None else f"{name} of layer {layer}"

    def _part(self, name: str, layer: int | None) -> tensorstore.TensorStore:
        return self._stores[name] if layer is None else self._stores[name][layer]

    def _on_disk[T](self, work: Callable[[], T]) -> T:
        return self._disk.submit(work).result()

    def _open_all(self) -> None:
        """Open all arrays without a cache, so that reads come from the disk."""
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})

        def open_(name: str, array: jax.ShapeDtypeStruct) -> tensorstore.TensorStore:
            stacked = name.partition("/")[0] in STACKS
            shape = array.shape[1:] if stacked else array.shape
            chunk = (min(_rows(shape, array.dtype), shape[0]), *shape[1:])
            return arrays.create(self.folder, name, array, (1, *chunk) if stacked else chunk, context).result()

        self._stores = {name: self._on_disk(lambda: open_(name, array)) for name, array in self.arrays.items()}


def _rows(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """The number of rows in a piece."""
    return max(1, CHUNK // (dtype.itemsize * math.prod(shape[1:])))


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.reshape(-1).view(np.uint8), digest_size=16).digest()
