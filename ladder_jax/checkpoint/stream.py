"""Write a checkpoint's parameters array by array, or layer by layer, in Orbax's storage format.

A Store saves arrays that are in memory. A Stream writes a model that is too large for the host's
memory. Each array is a zarr array in one OCDBT database, a chunk of it a part of one layer. Orbax's
description of the arrays, `_METADATA`, is written last.
"""

import concurrent.futures
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import tensorstore

from ladder_jax.checkpoint import arrays as stores
from ladder_jax.nn.parameter import STACKS

CHUNK = 1 << 25  # bytes that are compressed at a time, at most


class Stream:
    """Writes one item of a checkpoint: `stream.put("layers/mlp/up", values,
    layer=3)` for each array, then `finish()`.

    arrays: the shape and dtype of each array by name; arrays of layers are stacked, [L, ...].
    `folder` must not exist yet. A failed write raises tensorstore's ValueError or OSError.

    Use it in a `with` block. All disk access runs in a thread, where the exception of a signal
    handler cannot interrupt it; it has ended when the block ends. A write that ran on would create
    the folder again after its removal.
    """

    def __init__(self, folder: pathlib.Path, arrays: Mapping[str, jax.ShapeDtypeStruct]):
        self._disk = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="ladder_jax stream"
        )
        self._on_disk(lambda: None)  # starts the thread now, so that __exit__ always waits for it
        try:
            folder.mkdir(parents=True)
            self.folder, self.arrays = folder, dict(arrays)
            self._digests: dict[stores.Key, bytes] = {}
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
        values = np.ascontiguousarray(values, self.arrays[name].dtype)
        self._on_disk(lambda: target.write(values).result())
        self._digests[name, layer] = _digest(values)

    @property
    def count(self) -> int:
        """The number of arrays and layers written."""
        return len(self._digests)

    def finish(self) -> None:
        """Write Orbax's description of the arrays."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        (self.folder / stores.METADATA).write_text(stores.described(shapes), encoding="utf-8")

    def differences(self) -> Iterator[str | None]:
        """Reads everything back. Yields None for each that equals what was written, else the
        array's name.
        """
        self._open_all()
        for (name, layer), digest in self._digests.items():
            part = self._part(name, layer)
            same = _digest(self._on_disk(lambda: part.read().result())) == digest
            yield None if same else name if layer is None else f"{name} of layer {layer}"

    def _part(self, name: str, layer: int | None) -> tensorstore.TensorStore:
        return self._stores[name] if layer is None else self._stores[name][layer]

    def _on_disk[T](self, work: Callable[[], T]) -> T:
        return self._disk.submit(work).result()

    def _open_all(self) -> None:
        """Open all arrays without a cache, so that reads come from the disk."""
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._stores = {
            name: self._on_disk(lambda: self._open(name, array))
            for name, array in self.arrays.items()
        }

    def _open(self, name: str, array: jax.ShapeDtypeStruct) -> tensorstore.TensorStore:
        stacked = name.partition("/")[0] in STACKS
        rows, *others = array.shape[1:] if stacked else array.shape
        step = max(1, CHUNK // (array.dtype.itemsize * int(np.prod(others))))
        chunk = [*([1] if stacked else []), min(step, rows), *others]
        within = stores.database(self.folder.absolute())
        return stores.create(within, name, array, chunk=chunk, context=self._context).result()


def _digest(values: np.ndarray) -> bytes:
    flat = np.ascontiguousarray(values).reshape(-1)
    return hashlib.blake2b(flat.view(np.uint8), digest_size=16).digest()
