"""A checkpoint's arrays in S3, written and read by tensorstore: Orbax writes to local folders and gs:// only.

The storage format is Orbax's, so a folder that is copied to a disk is read there as any other: each process writes its
shards into an OCDBT database of zarr arrays, and the first process merges these databases, without copying values.
"""

import concurrent.futures
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from ladder_jax.checkpoint.stream import METADATA, described
from ladder_jax.files import AnyPath, kvstore
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS
from ladder_jax.parallel import mesh as meshes

LARGEST = 400 << 20  # bytes of a chunk, and of an object before its last chunk; S3 takes at most 5 GB in one request
THREADS = 16  # arrays that are read at a time
# As Orbax has them; two databases can only be merged if they are equal.
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}


def begin(folder: AnyPath, arrays: Mapping[str, jax.Array]) -> list[tensorstore.Future]:
    """Copies this process's shards of the arrays, by name, to the host, and starts to write them."""
    database, context = _database(_part(folder, jax.process_index())), tensorstore.Context()
    opening = {name: _create(database, name, array, context) for name, array in arrays.items()}
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
    merged = tensorstore.KvStore.open(_database(folder), context=context).result()
    parts = [_database(_part(folder, process)) for process in range(jax.process_count())]
    for part in [tensorstore.KvStore.open(part, context=context) for part in parts]:
        part.result().experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()
    (folder / METADATA).write_text(described(shapes))


def stored(folder: AnyPath) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each stored array, by name."""
    database, ending = tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore(folder)}).result(), "/.zarray"
    keys = [key.decode() for key in database.list().result() if key.endswith(ending.encode())]
    found = {}
    for key, read in [(key, database.read(key)) for key in keys]:
        about = json.loads(read.result().value)
        name = key.removesuffix(ending).replace(".", "/")
        found[name] = jax.ShapeDtypeStruct(tuple(about["shape"]), jnp.dtype(about["dtype"]))
    return found


def read(folder: AnyPath, like: Any) -> Params:
    """The arrays of `like`, a pytree, with its shapes, dtypes and shardings; what is not stored of a shape is zero."""
    context, database = tensorstore.Context(), {"driver": "ocdbt", "base": kvstore(folder)}

    def one(named: tuple[str, jax.ShapeDtypeStruct]) -> jax.Array:
        name, array = named
        spec = {"driver": "zarr", "kvstore": {**database, "path": _key(name)}, "fill_missing_data_reads": False}
        store = tensorstore.open(spec, open=True, read=True, context=context).result()

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            ends = [(*axis.indices(n)[:2], size) for axis, n, size in zip(index, array.shape, store.shape)]
            part = tuple(slice(min(start, size), min(stop, size)) for start, stop, size in ends)
            return store[part].read().result().astype(array.dtype)

        return meshes.place(shard, array.shape, array.sharding)

    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = ["/".join(str(getattr(key, "key", key)) for key in path) for path, _ in paths]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return structure.unflatten(pool.map(one, zip(names, (array for _, array in paths))))


def _part(folder: AnyPath, process: int) -> AnyPath:
    return folder / f"ocdbt.process_{process}"


def _database(folder: AnyPath) -> dict[str, Any]:
    about = {"config": _CONFIG, "assume_config": True, "target_data_file_size": LARGEST}
    return {"driver": "ocdbt", "base": kvstore(folder), **about}


def _key(name: str) -> str:
    return f"{name.replace('/', '.')}/"


def _create(database: dict, name: str, array: jax.Array, context: tensorstore.Context) -> tensorstore.Future:
    spec = {
        "driver": "zarr",
        "kvstore": {**database, "path": _key(name)},
        "metadata": {"chunks": _chunk(name, array), "compressor": {"id": "zstd", "level": 1}},
        "store_data_equal_to_fill_value": True,  # so that a missing chunk is damage, which `read` reports
    }
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
