"""Load a model's arrays onto a mesh. The host holds at most one array at a time."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, parallel
from ladder_jax.config import Loop
from ladder_jax.nn.parameter import stacks
from ladder_jax.parallel import mesh as meshes
from ladder_jax.pretrained.source import Key, Source

type Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Yields each key's array in turn, on its devices, of one layer: `reader`, or `checkpoint.Pieces`."""


def load(
    source: Source,
    *,
    mesh: jax.sharding.Mesh | parallel.NamedMesh,
    dtype: np.dtype | None = None,
    loop: Loop = Loop.SCAN,
    done: Callable[[Key], object] = lambda key: None,
) -> nn.Params:
    """The parameters on `mesh` (axes data, fsdp, tensor), with the shardings of `nn.define(source.model, mesh=mesh)`.

    dtype: of all arrays; None keeps the stored dtypes (a stack gets one that holds the values of all its layers).
    loop: SCAN for layers stacked [L, ...], as in training and checkpoints; UNROLLED for a tuple of layers.
    done: called with the key of each array after it is loaded.
    Raises UserError if the model cannot be split over the mesh.
    """
    mesh = parallel.mesh_of(mesh)
    definition = nn.define(parallel.with_ranks(source.model, tensor=mesh.shape["tensor"]), mesh=mesh)
    return assemble(definition, reader(source, definition, dtype=dtype, loop=loop, done=done), loop=loop)


def assemble(definition: nn.ModelDef, read: Reader, *, dtype: np.dtype | None = None, loop: Loop = Loop.SCAN):
    """The parameters of `definition`, read one by one; `dtype` and `loop` as in `load`."""
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    counts = {stack: len(of) for stack, of in stacks(definition.config).items()}
    layers = {name: range(counts.get(name.partition("/")[0], 0)) for name in dims}
    arrays = read([Key(name, layer) for name in dims for layer in layers[name] or (None,)])
    whole, by_layer = {}, {stack: [{} for _ in range(count)] for stack, count in counts.items()}
    for name, letters in dims.items():
        if letters[0] != "L":
            whole[name] = _cast(next(arrays), dtype)
            continue
        if loop is Loop.UNROLLED:
            stack, _, suffix = name.partition("/")
            for layer in layers[name]:
                by_layer[stack][layer][suffix] = _cast(next(arrays), dtype)
            continue
        stack = None
        for layer in layers[name]:
            array = next(arrays)
            if stack is None:
                stack = meshes.zeros(abstract[name].shape, np.dtype(dtype or array.dtype), abstract[name].sharding)
            stack = jax.block_until_ready(meshes.put(stack, _cast(array, dtype), layer))
            del array
        whole[name] = stack
    nested = functools.partial(traverse_util.unflatten_dict, sep="/")
    apart = {stack: tuple(map(nested, each)) for stack, each in by_layer.items()}
    return {**nested(whole), **(apart if loop is Loop.UNROLLED else {})}


def reader(
    source: Source,
    definition: nn.ModelDef,
    *,
    dtype: np.dtype | None = None,
    loop: Loop = Loop.UNROLLED,
    done: Callable[[Key], object] = lambda key: None,
) -> Reader:
    """Reads arrays onto their devices one at a time, for `Engine(definition, pretrained.reader(source, definition))`.

    dtype, done: as in `load`. loop: with SCAN, the layers of a stack get one dtype. The engine casts or quantizes each
    array before the next is read.
    """
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    stacked = _stack_dtypes(source) if loop is Loop.SCAN else {}

    def place(key: Key) -> jax.Array:
        name, layer = key
        letters = dims[name].removeprefix("L")
        shape = abstract[name].shape[-len(letters) :]
        settings = dict(dtype=dtype or stacked.get(name), layout=definition.layout, done=done)
        return _place(source, Key(name, layer), letters, shape, **settings)

    return lambda keys: map(place, keys)


def _stack_dtypes(source: Source) -> Mapping[str, np.dtype]:
    """A dtype for each array that holds the values of all its layers."""
    dtypes = {}
    for key, array in source.arrays.items():
        dtypes[key.name] = jnp.promote_types(dtypes.get(key.name, array.dtype), array.dtype)
    return dtypes


def _cast(array: jax.Array, dtype: np.dtype | None) -> jax.Array:
    return array if dtype is None or array.dtype == dtype else array.astype(dtype)


def _place(source: Source, key: Key, dims: str, shape: tuple[int, ...], *, dtype, layout, done) -> jax.Array:
    """One array on its devices, padded with zeros to `shape`. The host holds the array and its shards."""
    stored = source.arrays[key]
    values, dtype = stored.read(), np.dtype(dtype or stored.dtype)
    array = meshes.place(lambda index: _copy(values[index], dtype), shape, layout.sharding(dims))
    done(key)
    return array


def _copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy. A CPU device may use its buffer itself; a view would keep the whole array in memory."""
    if values.dtype != dtype:
        return np.array(values, dtype, order="C")
    # Copied as integers: NumPy copies bfloat16 value by value, 15 times slower.
    return np.array(values.view(f"u{dtype.itemsize}"), order="C").view(dtype)
