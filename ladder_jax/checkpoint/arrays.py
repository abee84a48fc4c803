"""A checkpoint's arrays, read by tensorstore from any folder, and written by it to S3, where Orbax does not write.

The storage format is Orbax's: zarr arrays in an OCDBT database. In S3 each process writes its shards into a database of
its own, and the first process merges these databases, without copying values.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from ladder_jax.files import AnyPath, kvstore
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS
from ladder_jax.parallel import mesh as meshes

METADATA = "_METADATA"  # the file with Orbax's description of the arrays
DICT_KEY = 2  # Orbax's number for a key of a dict
AHEAD = 1 << 29  # bytes that a Reader reads in advance
LARGEST = 400 << 20  # bytes of a chunk, and of an object before its last chunk; S3 takes at most 5 GB in one request
THREADS = 16  # arrays that are read at a time
# As Orbax has them; two databases can only be merged if they are equal.
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}

Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and the layer's index if layers are stacked


def named(tree: Any) -> dict[str, Any]:
    """A nested dict's arrays by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {"/".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}


def stored(folder: AnyPath) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each stored array, by name."""
    store, ending = tensorstore.KvStore.open(database(folder)).result(), "/.zarray"
    keys = [key.decode() for key in store.list().result() if key.endswith(ending.encode())]
    found = {}
    for key, read in [(key, store.read(key)) for key in keys]:
        about = json.loads(read.result().value)
        name = key.removesuffix(ending).replace(".", "/")
        found[name] = jax.ShapeDtypeStruct(tuple(about["shape"]), jnp.dtype(about["dtype"]))
    return found


def read(folder: AnyPath, like: Params) -> Params:
    """The arrays of `like`, with its shapes, dtypes and shardings; what is not stored of a shape is zero."""
    context = tensorstore.Context()

    def one(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
        store = _open(folder, name, context)

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            return store[_within(index, array.shape, store.shape)].read().result().astype(array.dtype)

        return meshes.place(shard, array.shape, array.sharding)

    wanted = named(like)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return jax.tree.unflatten(jax.tree.structure(like), pool.map(one, wanted.keys(), wanted.values()))


def database(folder: AnyPath) -> dict[str, Any]:
    """Tensorstore's specification of an item's database."""
    return {"driver": "ocdbt", "base": kvstore(folder)}


def described_array(within: dict[str, Any], name: str, chunk: Sequence[int] | None = None) -> dict[str, Any]:
    """Tensorstore's specification of an array, which is made in chunks of this shape if it is not there."""
    spec = {"driver": "zarr", "kvstore": {**within, "path": f"{name.replace('/', '.')}/"}}
    made = {"metadata": {"chunks": list(chunk), "compressor": {"id": "zstd", "level": 1}}} if chunk is not None else {}
    return {**spec, **made}


def described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Orbax's description of arrays, by name: the content of METADATA."""
    tree = {}
    for name, shape in shapes.items():
        keys = name.split("/")
        about = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)}
        described_keys = [{"key": key, "key_type": DICT_KEY} for key in keys]
        tree[str(tuple(keys))] = {"key_metadata": described_keys, "value_metadata": about}
    metadata = {"tree_metadata": tree, "use_ocdbt": True, "use_zarr3": False, "custom_metadata": None}
    return json.dumps(metadata | {"store_array_data_equal_to_fill_value": True})


def _open(folder: AnyPath, name: str, context: tensorstore.Context) -> tensorstore.TensorStore:
    """Open an array without reading its values."""
    return tensorstore.open(described_array(database(folder), name), open=True, read=True, context=context).result()


def _within(index: tuple[slice, ...], shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[slice, ...]:
    """`index` of an array of `shape`, cut to the stored shape: a vocabulary may have less padding than here."""
    ends = [(*axis.indices(n)[:2], size) for axis, n, size in zip(index, shape, stored)]
    return tuple(slice(min(start, size), min(stop, size)) for start, stop, size in ends)


class _Part(NamedTuple):
    """The unit of reading: an array, or the layers in one stored chunk of a stack, from layer `first` on."""

    name: str
    first: int | None


@dataclasses.dataclass(frozen=True)
class Piecewise:
    """An array that is read whole, or of a stack the layers in one stored chunk at a time.

    shape, sharding: without the dimension L. span: the block that covers this process's shards.
    """

    store: tensorstore.TensorStore
    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding

    @property
    def layers(self) -> int:
        """In a stored chunk of a stack."""
        return self.store.chunk_layout.read_chunk.shape[0]

    @functools.cached_property
    def span(self) -> tuple[slice, ...]:
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        ends = [[axis.indices(n)[:2] for axis, n in zip(index, self.shape)] for index in indices]
        return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*ends))

    def begin(self, first: int | None) -> tensorstore.Future:
        layers = () if first is None else (slice(first, min(first + self.layers, self.store.shape[0])),)
        return self.store[layers + _within(self.span, self.shape, self.store.shape[len(layers) :])].read()

    def size(self, first: int | None) -> int:
        """Bytes that `begin` reads."""
        items = math.prod(axis.stop - axis.start for axis in self.span)
        return items * (1 if first is None else self.layers) * self.store.dtype.numpy_dtype.itemsize

    def place(self, values: np.ndarray) -> jax.Array:
        """The array on the devices. values: of the span."""

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            ends = [(*axis.indices(n)[:2], of.start) for axis, n, of in zip(index, self.shape, self.span)]
            return np.ascontiguousarray(values[tuple(slice(a - start, b - start) for a, b, start in ends)])

        return meshes.place(shard, self.shape, self.sharding)


def pieces(folder: AnyPath, like: Mapping[str, jax.ShapeDtypeStruct], keys: Sequence[Key]) -> Iterator[jax.Array]:
    """Each key's array, with the shape and sharding of `like[name]`, which of a stack is one layer's.

    Arrays keep the stored dtype. They are read in advance, in the order of their first use, and each is freed after its
    last. The host holds up to AHEAD bytes, or one array if that is larger.
    """
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
    arrays = {
        name: Piecewise(_open(folder, name, context), like[name].shape, like[name].sharding)
        for name in dict.fromkeys(name for name, _ in keys)
    }
    parts = [_Part(name, layer and layer // arrays[name].layers * arrays[name].layers) for name, layer in keys]
    last_use = {part: index for index, part in enumerate(parts)}
    pending = list(dict.fromkeys(parts))[::-1]
    reads: dict[_Part, tensorstore.Future] = {}

    def take(index: int) -> jax.Array:
        part, (name, layer) = parts[index], keys[index]
        size = lambda following: sum(arrays[one.name].size(one.first) for one in (*reads, following))
        while pending and (part not in reads or size(pending[-1]) <= AHEAD):
            following = pending.pop()
            reads[following] = arrays[following.name].begin(following.first)
        values = reads[part].result()
        if last_use[part] == index:
            del reads[part]
        return arrays[name].place(values if layer is None else values[layer - part.first])

    for index in range(len(keys)):
        yield take(index)  # no local variable: it would keep the array alive


def begin(folder: AnyPath, arrays: Mapping[str, jax.Array]) -> list[tensorstore.Future]:
    """Copies this process's shards of the arrays, by name, to the host, and starts to write them."""
    written, context = _written(_part(folder, jax.process_index())), tensorstore.Context()
    opening = {name: _create(written, name, array, context) for name, array in arrays.items()}
    writes = []
    for name, array in arrays.items():
        store = opening[name].result()
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                writes.append(store[shard.index].write(np.array(shard.data)).commit)
    return writes


def finish(folder: AnyPath, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Makes one database of all processes'. Called on one process, after all have written."""
    context, transaction = tensorstore.Context(), tensorstore.Transaction(atomic=True)
    merged = tensorstore.KvStore.open(_written(folder), context=context).result()
    parts = [_written(_part(folder, process)) for process in range(jax.process_count())]
    for part in [tensorstore.KvStore.open(part, context=context) for part in parts]:
        part.result().experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()
    (folder / METADATA).write_text(described(shapes))


def _part(folder: AnyPath, process: int) -> AnyPath:
    return folder / f"ocdbt.process_{process}"


def _written(folder: AnyPath) -> dict[str, Any]:
    return {**database(folder), "config": _CONFIG, "assume_config": True, "target_data_file_size": LARGEST}


def _create(written: dict[str, Any], name: str, array: jax.Array, context: tensorstore.Context) -> tensorstore.Future:
    spec = {**described_array(written, name, _chunk(name, array)), "store_data_equal_to_fill_value": True}
    about = dict(shape=array.shape, dtype=tensorstore.dtype(array.dtype), context=context)
    return tensorstore.open(spec, open=True, create=True, **about)


def _chunk(name: str, array: jax.Array) -> list[int]:
    """The shape of a chunk: a shard, of a stack one layer of it, cut until it has LARGEST bytes at most.

    It divides the shard, since a chunk of two processes' shards would be written twice.
    """
    chunk = list(array.sharding.shard_shape(array.shape))
    if name.partition("/")[0] in STACKS:
        chunk[0] = 1
    for axis, length in enumerate(chunk):
        slice_bytes = array.dtype.itemsize * math.prod(chunk[axis + 1 :])
        fitting = [n for n in range(1, length + 1) if length % n == 0 and n * slice_bytes <= LARGEST]
        chunk[axis] = max(fitting, default=1)
    return chunk
