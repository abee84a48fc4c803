"""A checkpoint's arrays, read by tensorstore from any folder, and written by it: into object stores,
and array by array or layer by layer where a model is too large for the host's memory
(`write_pieces`).

The storage format is Orbax's: zarr arrays in an OCDBT database, a chunk of an array a part of one
layer, and a description of them, METADATA, which is written last. In a store each process writes
its shards into a database of its own, and the first process merges these databases, without copying
values.
"""

import collections
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore

from ladder_jax.files import AnyPath, kvstore
from ladder_jax.nn.parameter import STACKS
from ladder_jax.parallel import mesh as meshes

METADATA = "_METADATA"  # the file with Orbax's description of the arrays
DICT_KEY = 2  # Orbax's number for a key of a dict
AHEAD = 1 << 29  # bytes that are read in advance
# bytes of a chunk, and of an object before its last chunk; S3 takes at most 5 GB in one request
LARGEST = 400 << 20
CHUNK = 1 << 25  # bytes that `write_pieces` compresses at a time, at most
# As Orbax has them; two databases can only be merged if they are equal.
_CONFIG = {
    "max_inline_value_bytes": 1024,
    "max_decoded_node_bytes": 100_000_000,
    "manifest_kind": "single",
}

type Abstract = Mapping[str, jax.ShapeDtypeStruct]  # of arrays, by name
type Index = tuple[slice, ...]
type Reads = dict[Index, tensorstore.Future]  # of an array's shards, by their places
type Shapes = Mapping[str, tuple[int, ...]]  # of arrays, by name
type Spec = dict[str, Any]  # of tensorstore
# an array's name, such as "layers/mlp/up", and the layer's index if layers are stacked
Key = tuple[str, int | None]


def named(tree: Any) -> dict[str, Any]:
    """A nested dict's arrays by name."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        arrays[name] = leaf
    return arrays


def shapes_of(tree: Any) -> Shapes:
    """The shapes of a nested dict's arrays."""
    return {name: tuple(array.shape) for name, array in named(tree).items()}


def stored(folder: AnyPath) -> Abstract:
    """The shape and dtype of each stored array, by name."""
    store = tensorstore.KvStore.open(database(folder)).result()
    reads = {}
    for key in store.list().result():
        path = key.decode()
        if path.endswith("/.zarray"):
            reads[path] = store.read(path)
    found = {}
    for path, read in reads.items():
        name = path.removesuffix("/.zarray").replace(".", "/")
        about = json.loads(read.result().value)
        found[name] = jax.ShapeDtypeStruct(about["shape"], about["dtype"])
    return found


def read(folder: AnyPath, like: Abstract, keys: Sequence[Key] | None = None) -> Iterator[jax.Array]:
    """The array of each key (by default of all of `like`), with the shape, dtype and sharding that
    `like` has for it.

    For layers these are without dimension L. What is not stored of a shape is zero. Each process
    reads its own shards, once, those of the next keys in advance: the host holds up to AHEAD bytes,
    or one array if that is larger.
    """
    if keys is None:
        keys = [(name, None) for name in like]
    opening = {name: opened(folder, name) for name in dict.fromkeys(name for name, _ in keys)}
    stores = {name: store.result() for name, store in opening.items()}

    # neither may hold a yielded array: it would be kept alive
    ahead = collections.deque()
    held = 0
    for name, layer in keys:
        about = like[name]
        while ahead and held + _size(about) > AHEAD:
            held -= _size(ahead[0][1])
            yield _placed(*ahead.popleft())
        ahead.append((begin_read(_part_of(stores[name], layer), about), about))
        held += _size(about)
    while ahead:
        yield _placed(*ahead.popleft())


def _size(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def opened(folder: AnyPath, name: str) -> tensorstore.Future:
    """An array, without its values."""
    spec = described_array(database(folder), name)
    return tensorstore.open(spec, open=True, read=True)


def begin_read(store: tensorstore.TensorStore, like: jax.ShapeDtypeStruct) -> Reads:
    """Starts to read this process's shards, by their places; a stored vocabulary may have less
    padding than `like`.
    """
    places = like.sharding.addressable_devices_indices_map(like.shape).values()
    reads = {}
    for index in set(places):
        there = []
        for axis, length, size in zip(index, like.shape, store.shape):
            start, stop, _ = axis.indices(min(length, size))
            there.append(slice(start, stop))
        reads[index] = store[tuple(there)].read()
    return reads


def _placed(reads: Reads, like: jax.ShapeDtypeStruct) -> jax.Array:
    def shard(index):
        values = reads[index].result()
        return values.astype(like.dtype, copy=False)

    return meshes.place(shard, like.shape, like.sharding)


def database(folder: AnyPath) -> Spec:
    """Tensorstore's specification of an item's database."""
    return {"driver": "ocdbt", "base": kvstore(folder)}


def described_array(within: Spec, name: str) -> Spec:
    """Tensorstore's specification of an array in a database."""
    folder = name.replace("/", ".")
    return {"driver": "zarr", "kvstore": {**within, "path": f"{folder}/"}}


def create(
    within: Spec,
    name: str,
    array: jax.ShapeDtypeStruct,
    *,
    chunk: Sequence[int],
    context: tensorstore.Context,
) -> tensorstore.Future:
    """Opens an array in a database, or makes it, in chunks of this shape."""
    spec = described_array(within, name)
    compressor = {"id": "zstd", "level": 1}
    spec["metadata"] = {"chunks": list(chunk), "compressor": compressor}
    spec["store_data_equal_to_fill_value"] = True
    dtype = tensorstore.dtype(array.dtype)
    return tensorstore.open(
        spec, open=True, create=True, shape=array.shape, dtype=dtype, context=context
    )


def described(shapes: Shapes) -> str:
    """Orbax's description of arrays, by name: the content of METADATA."""
    tree = {}
    for name, shape in shapes.items():
        keys = name.split("/")
        about = {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)}
        described_keys = [{"key": key, "key_type": DICT_KEY} for key in keys]
        tree[str(tuple(keys))] = {"key_metadata": described_keys, "value_metadata": about}
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "custom_metadata": None,
        "store_array_data_equal_to_fill_value": True,
    }
    return json.dumps(metadata)


def begin(folder: AnyPath, arrays: Mapping[str, jax.Array]) -> list[tensorstore.Future]:
    """Copies this process's shards of the arrays, by name, to the host, and starts to write
    them.
    """
    part = _part(folder, jax.process_index())
    context = tensorstore.Context()
    opening = {}
    for name, array in arrays.items():
        chunk = _chunk(name, array)
        opening[name] = create(part, name, array, chunk=chunk, context=context)
    copied = []
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                copied.append((name, shard.index, np.array(shard.data)))
    writes = []
    for name, index, values in copied:
        place = opening[name].result()[index]
        write = place.write(values, can_reference_source_data_indefinitely=True)
        writes.append(write.commit)
    return writes


def finish(folder: AnyPath, shapes: Shapes) -> None:
    """Makes one database of all processes'. Called on one process, after all have written; again
    after an error, as the processes' databases stay, and one transaction merges them. Orbax's own
    merge takes a folder's name such as `run[1]` for a pattern.

    Raises ValueError where an array is missing.
    """
    context = tensorstore.Context()
    transaction = tensorstore.Transaction(atomic=True)
    merged = tensorstore.KvStore.open(_written(folder), context=context).result()
    for process in range(jax.process_count()):
        part = tensorstore.KvStore.open(_part(folder, process), context=context).result()
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()
    (folder / METADATA).write_text(described(shapes))
    if missing := shapes.keys() - stored(folder).keys():
        raise ValueError(f"{min(missing)} is missing")


def _part(folder: AnyPath, process: int) -> Spec:
    return _written(folder / f"ocdbt.process_{process}")


def _written(folder: AnyPath) -> Spec:
    return {
        **database(folder),
        "config": _CONFIG,
        "assume_config": True,
        "target_data_file_size": LARGEST,
    }


def _chunk(name: str, array: jax.Array) -> list[int]:
    """The shape of a chunk: a shard, of a stack one layer of it, cut until it has LARGEST bytes at
    most.

    It divides the shard, since a chunk of two processes' shards would be written twice.
    """
    chunk = list(array.sharding.shard_shape(array.shape))
    if name.partition("/")[0] in STACKS:
        chunk[0] = 1
    for axis, length in enumerate(chunk):
        slice_bytes = array.dtype.itemsize * math.prod(chunk[axis + 1 :])
        most = max(1, LARGEST // slice_bytes)
        chunk[axis] = max(n for n in range(1, length + 1) if length % n == 0 and n <= most)
    return chunk


def write_pieces(
    folder: pathlib.Path, like: Abstract, pieces: Iterable[tuple[Key, np.ndarray]]
) -> None:
    """Writes one item of a checkpoint, one array or layer after another, into a new folder. A
    failed write raises tensorstore's ValueError or OSError.

    like: the shape and dtype of each array by name; arrays of layers are stacked, [L, ...].
    """
    folder.mkdir(parents=True)
    context = tensorstore.Context()
    stores = {}
    for name, array in like.items():
        chunk = _rows(name, array)
        within = database(folder)
        stores[name] = create(within, name, array, chunk=chunk, context=context).result()
    for (name, layer), values in pieces:
        part = _part_of(stores[name], layer)
        if values.shape != tuple(part.shape):
            raise ValueError(f"{name} is {values.shape}, not {tuple(part.shape)}")
        values = np.ascontiguousarray(values, like[name].dtype)
        write = part.write(values)
        try:
            write.result()
        finally:  # one that ran on after an interrupt would make the folder again after its removal
            write.exception()
    shapes = {name: array.shape for name, array in like.items()}
    (folder / METADATA).write_text(described(shapes), encoding="utf-8")


def _part_of(array: tensorstore.TensorStore, layer: int | None) -> tensorstore.TensorStore:
    return array if layer is None else array[layer]


def _rows(name: str, array: jax.ShapeDtypeStruct) -> list[int]:
    """The shape of a chunk: rows of an array or a layer, of CHUNK bytes at most."""
    chunk = list(array.shape)
    axis = 0  # the one that is cut
    if name.partition("/")[0] in STACKS:
        chunk[0] = 1
        axis = 1
    slice_bytes = array.dtype.itemsize * math.prod(chunk[axis + 1 :])
    rows = max(1, CHUNK // slice_bytes)
    chunk[axis] = min(rows, chunk[axis])
    return chunk
