"""Read a checkpoint's parameters one at a time: a whole array, or one layer of a stack, directly into its shards.

Inference loads weights this way. Arrays keep the stored dtype. The host holds only the next few of them.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tensorstore
from flax import traverse_util

from ladder_jax.checkpoint.saved import Checkpoint, damaged
from ladder_jax.files import AnyPath, kvstore
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import mesh as meshes

AHEAD = 1 << 29  # bytes that are read in advance
Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and the layer's index if layers are stacked


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`Pieces(checkpoint, definition)(keys)` yields each key's array, sharded as in `definition`, without dimension L.

    Before the first array, the checkpoint's files are compared with the manifest. The host holds up to AHEAD bytes, or
    one array if that is larger. If a stored chunk holds several layers and `keys` alternates between stacks, the host
    holds one chunk of each stack. Raises Damaged if a file was changed, UserError if an array has another shape.
    """

    checkpoint: Checkpoint
    definition: ModelDef

    def __call__(self, keys: Sequence[Key]) -> Iterator[jax.Array]:
        self.checkpoint.compare("params", self.definition.abstract)
        try:
            reader = _Reader(self.checkpoint.path / "params", self.definition, keys)
            for index in range(len(keys)):
                yield reader.take(index)  # no local variable: it would keep the array alive
        except (ValueError, OSError) as error:  # tensorstore's
            if "RESOURCE_EXHAUSTED" in str(error):
                raise MemoryError(str(error)) from error
            raise damaged(self.checkpoint.path, error) from error


class _Part(NamedTuple):
    """The unit of reading: an array, or the layers in one stored chunk of a stack, from layer `first` on."""

    name: str
    first: int | None


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array in the store, and its sharding.

    shape, sharding: of one layer. span: the block that covers this process's shards.
    layers: the number of layers in a stored chunk.
    """

    store: tensorstore.TensorStore
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    span: tuple[slice, ...]
    layers: int

    def begin(self, first: int | None) -> tensorstore.Future:
        layers = () if first is None else (slice(first, min(first + self.layers, self.store.shape[0])),)
        return self.store[layers + self._stored()].read()

    def size(self, first: int | None) -> int:
        """Bytes that `begin` reads."""
        items = math.prod(len(range(*axis.indices(n))) for axis, n in zip(self.span, self.shape))
        return items * (1 if first is None else self.layers) * self.store.dtype.numpy_dtype.itemsize

    def place(self, values: np.ndarray) -> jax.Array:
        """The array on the devices. values: of the span."""

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            ranges = [axis.indices(n)[:2] for axis, n in zip(index, self.shape)]
            within = tuple(slice(a - axis.start, b - axis.start) for (a, b), axis in zip(ranges, self.span))
            return np.ascontiguousarray(values[within])

        return meshes.place(shard, self.shape, self.sharding)

    def _stored(self) -> tuple[slice, ...]:
        """The span, cut to the stored shape: the stored vocabulary may have less padding than this mesh's."""
        sizes = self.store.shape[-len(self.shape) :]
        return tuple(slice(min(axis.start, n), min(axis.stop, n)) for axis, n in zip(self.span, sizes))


class _Reader:
    """Reads parts in advance, in the order of their first use, and frees each after its last use."""

    def __init__(self, folder: AnyPath, definition: ModelDef, keys: Sequence[Key]):
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        dims, abstract = (traverse_util.flatten_dict(t, sep="/") for t in (definition.dims, definition.abstract))
        self._arrays: dict[str, _Array] = {}
        for name in dict.fromkeys(name for name, _ in keys):
            letters = dims[name].removeprefix("L")
            shape, sharding = abstract[name].shape[-len(letters) :], definition.layout.sharding(letters)
            store = _open(folder, name, context)
            layers = store.chunk_layout.read_chunk.shape[0]
            self._arrays[name] = _Array(store, shape, sharding, _span(shape, sharding), layers)
        self._keys, self._parts = keys, [self._part(*key) for key in keys]
        self._last_use = {part: index for index, part in enumerate(self._parts)}
        self._pending = list(dict.fromkeys(self._parts))[::-1]
        self._reads: dict[_Part, tensorstore.Future] = {}

    def take(self, index: int) -> jax.Array:
        """The array of `keys[index]`; call it with 0, 1, 2, ..."""
        (name, layer), part = self._keys[index], self._parts[index]
        while self._pending and (part not in self._reads or self._size(self._pending[-1]) <= AHEAD):
            following = self._pending.pop()
            self._reads[following] = self._arrays[following.name].begin(following.first)
        values = self._reads[part].result()
        if self._last_use[part] == index:
            del self._reads[part]
        return self._arrays[name].place(values if layer is None else values[layer - part.first])

    def _part(self, name: str, layer: int | None) -> _Part:
        layers = self._arrays[name].layers
        return _Part(name, None if layer is None else layer // layers * layers)

    def _size(self, following: _Part) -> int:
        """Bytes of all parts in memory and of `following`."""
        return sum(self._arrays[part.name].size(part.first) for part in (*self._reads, following))


def _open(folder: AnyPath, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """Open the array `name` in the item at `folder`, without reading its values."""
    database = {"driver": "ocdbt", "base": kvstore(folder), "path": f"{name.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": database}
    return tensorstore.open(spec, open=True, read=True, context=context).result()


def _span(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[slice, ...]:
    """The smallest block that covers the shards of all this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    ends = [[axis.indices(n)[:2] for axis, n in zip(index, shape)] for index in indices]
    return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*ends))
