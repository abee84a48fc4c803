"""Load a model's arrays onto a mesh. The host holds at most one array at a time."""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, parallel
from ladder_jax.nn.parameter import stack_of, stacks
from ladder_jax.parallel import mesh as meshes
from ladder_jax.pretrained.source import Key, Source

type Reader = Callable[[Sequence[Key]], Iterator[jax.Array]]
"""Yields each key's array in turn, on its devices, of one layer: `reader`, or
`checkpoint.Pieces`.
"""


def load(
    source: Source, *, mesh: jax.sharding.Mesh | parallel.NamedMesh, dtype: np.dtype | None = None
) -> nn.Params:
    """The parameters on `mesh` (axes data, fsdp, tensor), with the shardings of
    `nn.define(source.model, mesh=mesh)`.

    dtype: of all arrays; None keeps the stored dtypes (a stack gets one that holds the values of
    all its layers). Raises UserError if the model cannot be split over the mesh.
    """
    mesh = parallel.mesh_of(mesh)
    definition = nn.define(
        parallel.with_ranks(source.model, tensor=mesh.shape["tensor"]), mesh=mesh
    )
    return assemble(definition, reader(source, definition), dtype=dtype)


def assemble(definition: nn.ModelDef, read: Reader, *, dtype: np.dtype | None = None) -> nn.Params:
    """The parameters of `definition`, read one by one; `dtype` as in `load`."""
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    counts = {stack: len(of) for stack, of in stacks(definition.config).items()}
    layers_of = lambda name: range(counts.get(name.partition("/")[0], 0)) or (None,)
    keys = [Key(name, layer) for name in abstract for layer in layers_of(name)]
    arrays, found = read(keys), {}
    for name, layer in keys:
        array = next(arrays)
        array = array if dtype is None else array.astype(dtype)
        if layer is None:
            found[name] = array
        else:
            like = abstract[name]
            stack = (
                meshes.zeros(like.shape, array.dtype, like.sharding)
                if layer == 0
                else found.pop(name)
            )
            found[name] = jax.block_until_ready(meshes.put(stack, array, layer))
        del array  # before the next one is read
    return traverse_util.unflatten_dict(found, sep="/")


def load_layer(source: Source, definition: nn.ModelDef, number: int | None) -> nn.Params:
    """The parameters of one layer, counted over all stacks; None: what stands outside of the
    layers.
    """
    prefix, place = "", None
    if number is not None:
        stack, place = stack_of(definition.config, number)
        prefix = f"{stack}/"
    keys = [key for key in source.arrays if key.layer == place and key.name.startswith(prefix)]
    arrays = zip(keys, reader(source, definition)(keys), strict=True)
    return traverse_util.unflatten_dict(
        {key.name.removeprefix(prefix): array for key, array in arrays}, sep="/"
    )


def reader(source: Source, definition: nn.ModelDef) -> Reader:
    """Reads arrays onto their devices one at a time, for `Engine(definition,
    pretrained.reader(source, definition))`.

    The engine casts or quantizes each array before the next is read.
    """
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    dtypes = {}
    for key, array in source.arrays.items():
        dtypes[key.name] = jnp.promote_types(dtypes.get(key.name, array.dtype), array.dtype)

    def place(key: Key) -> jax.Array:
        """Padded with zeros to the shape in `definition`. The host holds the array and its
        shards.
        """
        key = Key(*key)
        letters = dims[key.name].removeprefix("L")
        shape = abstract[key.name].shape[-len(letters) :]
        dtype, values = np.dtype(dtypes[key.name]), source.arrays[key].read()
        return meshes.place(
            lambda index: _copy(values[index], dtype), shape, definition.layout.sharding(letters)
        )

    return lambda keys: map(place, keys)


def _copy(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A contiguous copy. A CPU device may use its buffer itself; a view would keep the whole array
    in memory.
    """
    if values.dtype != dtype:
        return np.array(values, dtype, order="C")
    # Copied as integers: NumPy copies bfloat16 value by value, 15 times slower.
    return np.array(values.view(f"u{dtype.itemsize}"), order="C").view(dtype)
