"""A checkpoint's arrays, on a disk, in gs:// or s3://: written and read by tensorstore, in Orbax's storage format.

Each process writes its shards into an OCDBT database of zarr arrays of its own. The first process then merges these
databases, without copying values. A chunk of a stack is one layer, so that single layers can be read.

Orbax itself (0.12.8) refuses s3:// (its tensorstore_utils.py, line 356). Its CheckpointManager has no digests, and its
processes wait for each other in barriers: where one disk is full, all processes learn of a barrier that timed out, and
none of the disk. Here no process waits for another; `store` does, and every process reports its own error.
"""

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from ladder_jax.files import AnyPath, kvstore
from ladder_jax.nn import Params
from ladder_jax.nn.parameter import STACKS
from ladder_jax.parallel import mesh as meshes

METADATA = "_METADATA"  # the name of Orbax's description of the arrays
LARGEST = 400 << 20  # bytes of a chunk, and of a file before its last chunk; S3 takes at most 5 GB in one request
AHEAD = 1 << 29  # bytes that are read in advance

_DICT_KEY = 2  # Orbax's number for a key of a dict
# As Orbax has them; two databases can only be merged if they are equal.
_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"}

Key = tuple[str, int | None]  # an array's name, such as "layers/mlp/up", and the layer's index if layers are stacked


def named(tree: Any) -> dict[str, Any]:
    """A nested dict's arrays by name, such as "layers/mlp/up"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {"/".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class HostArray:
    """An array, and the copies on the host of what this process writes of it: indices and values.

    chunk: the shape in which it is stored.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    shards: list[tuple[Any, np.ndarray]]


def on_host(tree: Params) -> dict[str, HostArray]:
    """Copies this process's shards to the host, by name. The arrays may be donated after that."""
    found = named(tree)
    shards = {name: _shards(array) for name, array in found.items()}
    for _, values in itertools.chain.from_iterable(shards.values()):
        if isinstance(values, jax.Array):
            values.copy_to_host_async()
    host = {}
    for name, array in found.items():
        # Where host and device share memory, jax does not use an array's again while NumPy sees it.
        as_numpy = np.asarray if isinstance(array, jax.Array) else np.array
        copies = [(index, as_numpy(values)) for index, values in shards[name]]
        host[name] = HostArray(array.shape, array.dtype, _chunk(name, array), copies)
    return host


def write(folder: AnyPath, host: Mapping[str, HostArray], *, within: float) -> None:
    """Writes this process's shards, and waits until they are written. As `wait`."""
    part = _part(folder, jax.process_index())
    context = tensorstore.Context()
    opening = {name: create(part, name, array, array.chunk, context) for name, array in host.items()}
    wait(opening.values(), within=within)
    writes = []
    for name, array in host.items():
        store = opening[name].result()
        writes += [store[index].write(values).commit for index, values in array.shards]
    wait(writes, within=within)


def wait(writes: Iterable[tensorstore.Future], *, within: float) -> None:
    """Waits until all are opened or written. Raises tensorstore's errors, and TimeoutError.

    The first error is raised after the other writes have ended: one that went on would make its removed folder again.
    within: seconds.
    """
    errors = []
    for write in writes:
        try:
            write.result(timeout=within)
        except TimeoutError:  # of a disk that hangs no more is to be awaited
            raise
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def finish(folder: AnyPath, arrays: Mapping[str, Any]) -> None:
    """Makes one database of all processes'. Called on one process, after all have written; it may be called again."""
    context = tensorstore.Context()
    transaction = tensorstore.Transaction(atomic=True)
    merged = tensorstore.KvStore.open(_database(folder), context=context).result()
    for process in range(jax.process_count()):
        part = tensorstore.KvStore.open(_database(_part(folder, process)), context=context).result()
        if arrays and not part.list().result():
            raise ValueError(f"the arrays of process {process} are not there")
        part.experimental_copy_range_to(merged.with_transaction(transaction)).result()
    transaction.commit_sync()
    describe(folder, arrays)


def describe(folder: AnyPath, arrays: Mapping[str, Any]) -> None:
    """Write Orbax's description of the arrays: the file METADATA."""
    tree = {}
    for name, array in arrays.items():
        names = name.split("/")
        tree[str(tuple(names))] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in names],
            "value_metadata": {
                "value_type": "jax.Array",
                "skip_deserialize": False,
                "write_shape": list(array.shape),
            },
        }
    about = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "custom_metadata": None,
        "store_array_data_equal_to_fill_value": True,
    }
    (folder / METADATA).write_text(json.dumps(about))


def stored(folder: AnyPath) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each stored array, by name."""
    database = tensorstore.KvStore.open({"driver": "ocdbt", "base": kvstore(folder)}).result()
    ending = "/.zarray"
    keys = [key.decode() for key in database.list().result()]
    reading = {key: database.read(key) for key in keys if key.endswith(ending)}
    found = {}
    for key, read_ in reading.items():
        about = json.loads(read_.result().value)
        name = key.removesuffix(ending).replace(".", "/")
        found[name] = jax.ShapeDtypeStruct(tuple(about["shape"]), jnp.dtype(about["dtype"]))
    return found


def read(folder: AnyPath, wanted: Sequence[tuple[Key, jax.ShapeDtypeStruct]]) -> Iterator[jax.Array]:
    """Yields each key's array, or its one layer, with the given shape, dtype and sharding; zero where it is padded.

    The host holds up to AHEAD bytes, or one array if that is larger, and as much of chunks that hold several layers.
    """
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": AHEAD}})
    opening = {name: open_array(folder, name, context) for (name, _), _ in wanted}
    blocks = []
    for (name, layer), like in wanted:
        store = opening[name].result()
        blocks.append(Block(store if layer is None else store[layer], like))
    reads: collections.deque[tensorstore.Future] = collections.deque()
    begun = held = 0
    for index, block in enumerate(blocks):
        while begun < len(blocks) and (begun == index or held + blocks[begun].bytes <= AHEAD):
            reads.append(blocks[begun].begin())
            held += blocks[begun].bytes
            begun += 1
        yield block.place(reads.popleft().result())  # no local variable: it would keep the array alive
        held -= block.bytes


class Block:
    """The smallest block of a stored array that covers the shards of all this process's devices."""

    def __init__(self, store: tensorstore.TensorStore, like: jax.ShapeDtypeStruct):
        self._like = like
        self._span = _span(like.shape, like.sharding)
        # The stored vocabulary may have less padding than this mesh's.
        ends = zip(self._span, store.shape)
        self._store = store[tuple(slice(min(axis.start, n), min(axis.stop, n)) for axis, n in ends)]

    @property
    def bytes(self) -> int:
        return self._store.size * self._store.dtype.numpy_dtype.itemsize

    def begin(self) -> tensorstore.Future:
        return self._store.read()

    def place(self, values: np.ndarray) -> jax.Array:
        """The array on the devices. values: what `begin` has read."""

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            ends = [axis.indices(n)[:2] for axis, n in zip(index, self._like.shape)]
            within = tuple(slice(a - axis.start, b - axis.start) for (a, b), axis in zip(ends, self._span))
            return np.asarray(values[within], self._like.dtype, order="C")

        return meshes.place(shard, self._like.shape, self._like.sharding)


def open_array(folder: AnyPath, name: str, context: tensorstore.Context | None = None) -> tensorstore.Future:
    """The stored array `name`, whose values are not read yet."""
    database = {"driver": "ocdbt", "base": kvstore(folder), "path": _path(name)}
    spec = {"driver": "zarr", "kvstore": database}
    return tensorstore.open(spec, open=True, read=True, context=context)


def create(
    folder: AnyPath, name: str, like: Any, chunk: Sequence[int], context: tensorstore.Context
) -> tensorstore.Future:
    """The array `name` in the database at `folder`, with the shape and dtype of `like`; an existing one is opened."""
    spec = {
        "driver": "zarr",
        "kvstore": {**_database(folder), "path": _path(name)},
        "metadata": {"chunks": list(chunk), "compressor": {"id": "zstd", "level": 1}},
        "store_data_equal_to_fill_value": True,
    }
    return tensorstore.open(
        spec, open=True, create=True, shape=like.shape, dtype=tensorstore.dtype(like.dtype), context=context
    )


def _shards(array: jax.Array | np.ndarray) -> list[tuple[Any, Any]]:
    """What this process writes of an array: indices and values. One process writes a shard that several hold."""
    if not isinstance(array, jax.Array):
        return [(..., array)] if jax.process_index() == 0 else []
    return [(shard.index, shard.data) for shard in array.addressable_shards if shard.replica_id == 0]


def _chunk(name: str, array: jax.Array | np.ndarray) -> tuple[int, ...]:
    """The shape of a chunk: a shard, of a stack one layer of it, cut until it has LARGEST bytes at most.

    It divides the shard, since a chunk of two processes' shards would be written twice.
    """
    chunk = list(array.sharding.shard_shape(array.shape) if isinstance(array, jax.Array) else array.shape)
    if name.partition("/")[0] in STACKS:
        chunk[0] = 1
    for axis, length in enumerate(chunk):
        slice_bytes = array.dtype.itemsize * math.prod(chunk[axis + 1 :])
        fitting = [n for n in range(1, length + 1) if length % n == 0 and n * slice_bytes <= LARGEST]
        chunk[axis] = max(fitting, default=1)
    return tuple(chunk)


def _span(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[slice, ...]:
    """The smallest block that covers the shards of all this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    ends = [[axis.indices(n)[:2] for axis, n in zip(index, shape)] for index in indices]
    return tuple(slice(min(a for a, _ in axis), max(b for _, b in axis)) for axis in zip(*ends))


def _part(folder: AnyPath, process: int) -> AnyPath:
    return folder / f"ocdbt.process_{process}"


def _database(folder: AnyPath) -> dict[str, Any]:
    about = {"config": _CONFIG, "assume_config": True, "target_data_file_size": LARGEST}
    return {"driver": "ocdbt", "base": kvstore(folder), **about}


def _path(name: str) -> str:
    """In a database, as Orbax has it."""
    return f"{name.replace('/', '.')}/"
