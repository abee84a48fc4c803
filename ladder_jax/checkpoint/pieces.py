"""A checkpoint's parameters one by one: an array, or one layer of a stack, read straight into its devices' shares.

What inference starts from. Arrays come in the dtype in which they are stored; the host holds only those that are next.
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

AHEAD = 1 << 29  # bytes that may be read before they are asked for
Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and of a stack one of its layers


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`Pieces(checkpoint, definition)(keys)`: each key's array in turn, laid out as `definition` has it, without L.

    Nothing is read before the first is asked for; then the checkpoint's files are compared first. Of the host's memory
    it needs AHEAD bytes, or one array where that is more; of a checkpoint whose chunks hold several layers, one such
    chunk of every stack whose layers `keys` mixes. Raises Damaged where a file is not what was written, UserError for
    arrays of another shape.
    """

    checkpoint: Checkpoint
    definition: ModelDef

    def __call__(self, keys: Sequence[Key]) -> Iterator[jax.Array]:
        self.checkpoint.compare("params", self.definition.abstract)
        try:
            reading = _Reading(self.checkpoint.path / "params", self.definition, keys)
            for index in range(len(keys)):
                yield reading.take(index)  # never kept in a variable: it is gone as soon as its taker drops it
        except (ValueError, OSError) as error:  # tensorstore's
            if "RESOURCE_EXHAUSTED" in str(error):
                raise MemoryError(str(error)) from error
            raise damaged(self.checkpoint.path, error) from error


class _Part(NamedTuple):
    """What is read at once: an array, or as many layers of it as one chunk holds, from the `first` on."""

    name: str
    first: int | None


@dataclasses.dataclass(frozen=True)
class _Array:
    """Where an array's values come from, and where they go.

    shape, sharding: of one layer, on the devices. span: the rows and columns of it that this process's devices need.
    layers: how many layers a chunk holds.
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
        """In bytes, of what `begin` reads."""
        rows = math.prod(len(range(*where.indices(n))) for where, n in zip(self.span, self.shape))
        return rows * (1 if first is None else self.layers) * self.store.dtype.numpy_dtype.itemsize

    def place(self, values: np.ndarray) -> jax.Array:
        """On the devices: of `values`, those of the span."""

        def share(index: tuple[slice, ...]) -> np.ndarray:
            ranges = [where.indices(n)[:2] for where, n in zip(index, self.shape)]
            own = tuple(slice(a - of.start, b - of.start) for (a, b), of in zip(ranges, self.span))
            return np.ascontiguousarray(values[own])

        return placing.place(share, self.shape, self.sharding)

    def _stored(self) -> tuple[slice, ...]:
        """The span, as far as there are values: the vocabulary's padding depends on the mesh."""
        sizes = self.store.shape[-len(self.shape) :]
        return tuple(slice(min(of.start, n), min(of.stop, n)) for of, n in zip(self.span, sizes))


class _Reading:
    """Reads parts in the order in which they are first needed, and forgets each after its last use."""

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
        """The array of `keys[index]`; the indices must come in order."""
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
        """In bytes, of all that is read, with one part more."""
        return sum(self._arrays[part.name].size(part.first) for part in (*self._read, coming))


def _open(folder: pathlib.Path, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """An array of an item, its values not read."""
    base = {"driver": "file", "path": f"{folder}/"}
    place = {"driver": "ocdbt", "base": base, "path": f"{name.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": place}
    return tensorstore.open(spec, open=True, read=True, context=context).result()


def _span(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[slice, ...]:
    """From the first to the last row and column that any device of this process holds."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    ends = [[where.indices(n)[:2] for where, n in zip(index, shape)] for index in indices]
    return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*ends))
