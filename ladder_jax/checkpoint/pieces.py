"""A checkpoint's parameters one by one: an array, or one layer of a stack, read straight into its devices' shares.

Inference loads weights this way. Arrays keep the dtype in which they are stored; the host holds only the next few.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tensorstore
from flax import traverse_util

from ladder_jax.checkpoint.saved import Checkpoint, damaged
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import placing

AHEAD = 1 << 29  # bytes that are read in advance
Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and the index of a layer if it is a stack


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`Pieces(checkpoint, definition)(keys)`: each key's array in turn, laid out as `definition` has it, without L.

    The first array read compares the checkpoint's files with the manifest. The host holds up to AHEAD bytes, or one
    array where that is more; if the stored chunks hold several layers, one chunk of each stack whose layers `keys`
    mixes. Raises Damaged where a file differs from what was written, UserError for arrays of another shape.
    """

    checkpoint: Checkpoint
    definition: ModelDef

    def __call__(self, keys: Sequence[Key]) -> Iterator[jax.Array]:
        self.checkpoint.compare("params", self.definition.abstract)
        try:
            reading = _Reading(self.checkpoint.path / "params", self.definition, keys)
            for index in range(len(keys)):
                yield reading.take(index)  # without a variable, which would keep it alive after its user has dropped it
        except (ValueError, OSError) as error:  # tensorstore's
            if "RESOURCE_EXHAUSTED" in str(error):
                raise MemoryError(str(error)) from error
            raise damaged(self.checkpoint.path, error) from error


class _Part(NamedTuple):
    """One read: an array, or the layers of a stack that one stored chunk holds, from `first` on."""

    name: str
    first: int | None


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array in the store, and its layout on the devices.

    shape, sharding: of one layer. span: the part of it that this process's devices hold.
    layers: how many layers a stored chunk holds.
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
        rows = math.prod(len(range(*where.indices(n))) for where, n in zip(self.span, self.shape))
        return rows * (1 if first is None else self.layers) * self.store.dtype.numpy_dtype.itemsize

    def place(self, values: np.ndarray) -> jax.Array:
        """The array on the devices, from the `values` of the span."""

        def share(index: tuple[slice, ...]) -> np.ndarray:
            ranges = [where.indices(n)[:2] for where, n in zip(index, self.shape)]
            own = tuple(slice(a - of.start, b - of.start) for (a, b), of in zip(ranges, self.span))
            return np.ascontiguousarray(values[own])

        return placing.place(share, self.shape, self.sharding)

    def _stored(self) -> tuple[slice, ...]:
        """The span within the stored shape: the vocabulary's padding depends on the mesh."""
        sizes = self.store.shape[-len(self.shape) :]
        return tuple(slice(min(of.start, n), min(of.stop, n)) for of, n in zip(self.span, sizes))


class _Reading:
    """Reads parts in the order of their first use, in advance, and frees each after its last use."""

    def __init__(self, folder: pathlib.Path, definition: ModelDef, keys: Sequence[Key]):
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
        self._last = {part: index for index, part in enumerate(self._parts)}
        self._coming = list(dict.fromkeys(self._parts))[::-1]
        self._read: dict[_Part, tensorstore.Future] = {}

    def take(self, index: int) -> jax.Array:
        """The array of `keys[index]`; call it with 0, 1, 2, ..."""
        (name, layer), part = self._keys[index], self._parts[index]
        while self._coming and (part not in self._read or self._size(self._coming[-1]) <= AHEAD):
            coming = self._coming.pop()
            self._read[coming] = self._arrays[coming.name].begin(coming.first)
        values = self._read[part].result()
        if self._last[part] == index:
            del self._read[part]
        return self._arrays[name].place(values if layer is None else values[layer - part.first])

    def _part(self, name: str, layer: int | None) -> _Part:
        layers = self._arrays[name].layers
        return _Part(name, None if layer is None else layer // layers * layers)

    def _size(self, coming: _Part) -> int:
        """Bytes of all parts in memory, with one more."""
        return sum(self._arrays[part.name].size(part.first) for part in (*self._read, coming))


def _open(folder: pathlib.Path, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """An array of an item, without reading its values."""
    base = {"driver": "file", "path": f"{folder}/"}
    place = {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": place}
    return tensorstore.open(spec, open=True, read=True, context=context).result()


def _span(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[slice, ...]:
    """The smallest block that holds the shares of all this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    ends = [[where.indices(n)[:2] for where, n in zip(index, shape)] for index in indices]
    return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*ends))
