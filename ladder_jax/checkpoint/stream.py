"""Write a checkpoint's parameters piece by piece, in Orbax's storage format.

A Store saves arrays that are in memory. A Stream writes a model that is too large for the host's memory. Each array is
a zarr array in one OCDBT database. A chunk holds a part of one layer, so that pieces can be written and read
separately. Orbax's description of the arrays, `_METADATA`, is written last.
"""

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
import tensorstore

from ladder_jax.nn.parameter import STACKS

METADATA = "_METADATA"
CHUNK = 1 << 25  # bytes that are copied or compressed at a time, at most
DICT_KEY = 2  # Orbax's number for a key of a dict


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
        for start, stop in _pieces(values.shape, self.arrays[name].dtype.itemsize):
            piece = np.ascontiguousarray(values[start:stop], self.arrays[name].dtype)
            self._on_disk(lambda: target[start:stop].write(piece).result())
            self._digests[name, layer, start] = _digest(piece)

    def get(self, name: str, *, layer: int | None = None) -> np.ndarray:
        """Read an array, or one layer of it, back from the disk."""
        return self._on_disk(lambda: self._part(name, layer).read().result())

    @property
    def count(self) -> int:
        """The number of pieces written."""
        return len(self._digests)

    def finish(self) -> None:
        """Write Orbax's description of the arrays."""
        shapes = {name: array.shape for name, array in self.arrays.items()}
        (self.folder / METADATA).write_text(described(shapes), encoding="utf-8")

    def differences(self) -> Iterator[str | None]:
        """Reads every piece back. Yields None for each that equals what was written, else the array's name."""
        self._open_all()
        for (name, layer, start), digest in self._digests.items():
            target = self._part(name, layer)
            (stop,) = (b for a, b in _pieces(target.shape, self.arrays[name].dtype.itemsize) if a == start)
            stored = _digest(np.ascontiguousarray(self._on_disk(lambda: target[start:stop].read().result())))
            yield None if stored == digest else name if layer is None else f"{name} of layer {layer}"

    def _part(self, name: str, layer: int | None) -> tensorstore.TensorStore:
        return self._stores[name] if layer is None else self._stores[name][layer]

    def _on_disk[T](self, work: Callable[[], T]) -> T:
        return self._disk.submit(work).result()

    def _open_all(self) -> None:
        """Open all arrays without a cache, so that reads come from the disk."""
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._stores = {name: self._on_disk(lambda: self._open(name, array)) for name, array in self.arrays.items()}

    def _open(self, name: str, array: jax.ShapeDtypeStruct) -> tensorstore.TensorStore:
        stacked = name.partition("/")[0] in STACKS
        shape = array.shape[1:] if stacked else array.shape
        step = _step(shape, array.dtype.itemsize)
        chunks = (*((1,) if stacked else ()), min(step, shape[0]), *shape[1:])
        base = {"driver": "file", "path": f"{self.folder.absolute()}/"}
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"},
            "metadata": {"chunks": list(chunks), "compressor": {"id": "zstd", "level": 1}},
        }
        settings = dict(shape=array.shape, dtype=tensorstore.dtype(array.dtype), context=self._context)
        return tensorstore.open(spec, open=True, create=True, **settings).result()


def _step(shape: tuple[int, ...], itemsize: int) -> int:
    """The number of rows in a piece."""
    return max(1, CHUNK // (itemsize * int(np.prod(shape[1:]))))


def _pieces(shape: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    step = _step(shape, itemsize)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Orbax's description of arrays, by name: the content of METADATA."""
    tree = {str(tuple(name.split("/"))): _described(name, shape) for name, shape in shapes.items()}
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "custom_metadata": None}
    return json.dumps(metadata | {"store_array_data_equal_to_fill_value": True})


def _described(name: str, shape: tuple[int, ...]) -> dict:
    value = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)}
    return {"key_metadata": [{"key": key, "key_type": DICT_KEY} for key in name.split("/")], "value_metadata": value}


def _digest(piece: np.ndarray) -> bytes:
    return hashlib.blake2b(piece.reshape(-1).view(np.uint8), digest_size=16).digest()
