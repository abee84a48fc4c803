"""A Source's arrays onto a mesh: the host never holds more than one array, whatever the model's size."""

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
    """The parameters on `mesh` (axes data, fsdp, tensor), laid out as `nn.define(source.model, mesh=mesh)` has them.

    dtype: of all arrays; None keeps what is stored (of a stack: the one that holds all its layers' values).
    loop: SCAN for layers stacked [L, ...], as training and checkpoints have them; UNROLLED for a tuple of layers.
    done: told of each array once it is there.
    Raises UserError where the model cannot be split over the mesh.
    """
    config = parallel.with_ranks(source.model, tensor=mesh.shape["tensor"])
    definition = nn.define(config, mesh=mesh)
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    place = functools.partial(_place, source, layout=definition.layout, done=done)
    layers = range(config.num_layers)
    alone, stacks, apart = {}, {}, [{} for _ in layers]
    for name, letters in dims.items():
        if not letters.startswith("L"):
            alone[name] = place(Key(name), letters, abstract[name].shape, dtype=dtype)
            continue
        letters, shape, below = letters.removeprefix("L"), abstract[name].shape[1:], name.removeprefix("layers/")
        of_all = dtype or functools.reduce(jnp.promote_types, (source.arrays[Key(name, i)].dtype for i in layers))
        if loop is Loop.UNROLLED:
            for layer in layers:
                apart[layer][below] = place(Key(name, layer), letters, shape, dtype=dtype)
            continue
        stack = placing.zeros((len(layers), *shape), np.dtype(of_all), abstract[name].sharding)
        for layer in layers:
            part = place(Key(name, layer), letters, shape, dtype=of_all)
            stack = jax.block_until_ready(placing.put(stack, part, layer))
            del part
        stacks[below] = stack
    nested = functools.partial(traverse_util.unflatten_dict, sep="/")
    return {**nested(alone), "layers": nested(stacks) if loop is Loop.SCAN else tuple(map(nested, apart))}


def reader(source: Source, definition: nn.ModelDef) -> Callable[[Sequence[Key]], Iterator[jax.Array]]:
    """For `Engine(definition, pretrained.reader(source, definition))`: arrays on their devices, one at a time.

    They come in the dtype in which they are stored; each is cast, or quantized, before the next is read.
    """
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")

    def place(key: Key) -> jax.Array:
        name, layer = key
        letters = dims[name].removeprefix("L")
        shape = abstract[name].shape[-len(letters) :]
        more = dict(dtype=None, layout=definition.layout, done=lambda key: None)
        return _place(source, Key(name, layer), letters, shape, **more)

    return lambda keys: map(place, keys)


def _place(source: Source, key: Key, dims: str, shape: tuple[int, ...], *, dtype, layout, done) -> jax.Array:
    """One array on its devices, padded with zeros to `shape`: of the host's memory it needs what a device gets."""
    stored = source.arrays[key]
    values, dtype = stored.read(), np.dtype(dtype or stored.dtype)
    array = placing.place(lambda index: _copy(values[index], dtype), shape, layout.sharding(dims))
    done(key)
    return array


def _copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Always a copy: a CPU device may use the host's memory as it is, and a mapped file may change."""
    if values.dtype != dtype:
        return np.array(values, dtype, order="C")
    # As whole numbers: NumPy copies bfloat16 value by value, 15 times slower.
    return np.array(values.view(f"u{dtype.itemsize}"), order="C").view(dtype)
