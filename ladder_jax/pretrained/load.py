"""Load a Source's arrays onto a mesh. The host holds at most one array at a time."""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, parallel
from ladder_jax.config import Loop
from ladder_jax.parallel import placing
from ladder_jax.pretrained.source import Key, Source


def load(
    source: Source,
    *,
    mesh: jax.sharding.Mesh,
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
    config = parallel.with_ranks(source.model, tensor=mesh.shape["tensor"])
    definition = nn.define(config, mesh=mesh)
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    place = functools.partial(_place, source, layout=definition.layout, done=done)
    layers = range(config.num_layers)
    unstacked, stacks, by_layer = {}, {}, [{} for _ in layers]
    for name, letters in dims.items():
        if not letters.startswith("L"):
            unstacked[name] = place(Key(name), letters, abstract[name].shape, dtype=dtype)
            continue
        letters, shape, suffix = letters.removeprefix("L"), abstract[name].shape[1:], name.removeprefix("layers/")
        stack_dtype = dtype or functools.reduce(jnp.promote_types, (source.arrays[Key(name, i)].dtype for i in layers))
        if loop is Loop.UNROLLED:
            for layer in layers:
                by_layer[layer][suffix] = place(Key(name, layer), letters, shape, dtype=dtype)
            continue
        stack = placing.zeros((len(layers), *shape), np.dtype(stack_dtype), abstract[name].sharding)
        for layer in layers:
            array = place(Key(name, layer), letters, shape, dtype=stack_dtype)
            stack = jax.block_until_ready(placing.put(stack, array, layer))
            del array
        stacks[suffix] = stack
    nested = functools.partial(traverse_util.unflatten_dict, sep="/")
    return {**nested(unstacked), "layers": nested(stacks) if loop is Loop.SCAN else tuple(map(nested, by_layer))}


def reader(source: Source, definition: nn.ModelDef) -> Callable[[Sequence[Key]], Iterator[jax.Array]]:
    """Reads arrays onto their devices one at a time, for `Engine(definition, pretrained.reader(source, definition))`.

    Arrays have the stored dtype. The engine casts or quantizes each before the next is read.
    """
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")

    def place(key: Key) -> jax.Array:
        name, layer = key
        letters = dims[name].removeprefix("L")
        shape = abstract[name].shape[-len(letters) :]
        settings = dict(dtype=None, layout=definition.layout, done=lambda key: None)
        return _place(source, Key(name, layer), letters, shape, **settings)

    return lambda keys: map(place, keys)


def _place(source: Source, key: Key, dims: str, shape: tuple[int, ...], *, dtype, layout, done) -> jax.Array:
    """One array on its devices, padded with zeros to `shape`. The host holds the array and its shards."""
    stored = source.arrays[key]
    values, dtype = stored.read(), np.dtype(dtype or stored.dtype)
    array = placing.place(lambda index: _copy(values[index], dtype), shape, layout.sharding(dims))
    done(key)
    return array


def _copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy. A CPU device may use its buffer itself; a view would keep the whole array in memory."""
    if values.dtype != dtype:
        return np.array(values, dtype, order="C")
    # Copied as integers: NumPy copies bfloat16 value by value, 15 times slower.
    return np.array(values.view(f"u{dtype.itemsize}"), order="C").view(dtype)
