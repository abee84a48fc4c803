"""What inference's weights are built of, in which form each is stored, and what memory that takes."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from ladder_jax.config import Loop, Quantize
from ladder_jax.nn import ModelDef, Params, quantized
from ladder_jax.nn.quantized import Int8

JOINED = {  # which stand side by side, and along which axis, counted from the end: the same in a matrix and its scales
    "layers/attention/query_key_value": (("query", "key", "value"), -2),
    "layers/mlp/gate_up": (("gate", "up"), -1),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """An array of the result, or one of every layer: its name and dimensions without L, and what is joined to it."""

    name: str
    dims: str
    parts: tuple[str, ...]
    axis: int

    @classmethod
    def of(cls, name: str, dims: str) -> "Target":
        parts, axis = JOINED.get(name, ((name.rpartition("/")[2],), 0))
        folder = name.rpartition("/")[0]
        return cls(name, dims.removeprefix("L"), tuple(f"{folder}/{part}" for part in parts), axis)

    @property
    def stacked(self) -> bool:
        return self.name.startswith("layers/")


def targets(definition: ModelDef, kept: Params) -> list[Target]:
    """What is built, the largest arrays first: then the least is held beside them. kept: the dimensions of all."""
    found = [Target.of(*item) for item in traverse_util.flatten_dict(kept, sep="/").items()]
    return sorted(found, key=lambda target: -max(map(math.prod, part_shapes(definition, target))))


def part_shapes(definition: ModelDef, target: Target) -> list[tuple[int, ...]]:
    """A device's share of each of a target's parts, of one layer."""
    abstract = traverse_util.flatten_dict(definition.abstract, sep="/")
    share = lambda leaf: leaf.sharding.shard_shape(leaf.shape)[target.stacked :]
    return [share(abstract[part]) for part in target.parts]


def dims_of(quantize: Quantize, dims: str) -> str | Int8:
    """The dimensions in which an array with these is stored."""
    return Int8.dims(dims) if quantize is Quantize.INT8 and quantized.is_matrix(dims) else dims


def stored(quantize: Quantize, dtype: str, array: jax.Array, dims: str) -> jax.Array | Int8:
    """An array as it is stored. Norm gains stay float32: they multiply in it."""
    if quantize is Quantize.INT8 and quantized.is_matrix(dims):
        return Int8.of(array, dims)
    return array.astype(dtype_of(dtype, dims))


def dtype_of(dtype: str, dims: str) -> Any:
    return dtype if len(dims.removeprefix("L")) > 1 else jnp.float32


def sizes(definition: ModelDef, kept: Params, *, loop: Loop, quantize: Quantize) -> tuple[int, int]:
    """What `build` makes, and the most that it ever holds, from arrays in float32: bytes on a device."""
    done, most = 0, 0
    for target in targets(definition, kept):
        layers = definition.config.num_layers if target.stacked else 1
        made, read = zip(*(_bytes(definition, quantize, shape, dims) for shape, dims in _parts(definition, target)))
        total = layers * sum(made)
        in_place = loop is Loop.SCAN and target.stacked  # into a stack, which is there from the first layer on
        for index, size in enumerate(read):
            before = total + sum(made[: index + 1]) if in_place else layers * sum(made[: index + 1])
            most = max(most, done + before + size)
        if len(made) > 1:
            most = max(most, done + total + sum(made) * (1 + in_place))
        done += total
    return done, max(most, done)


def _parts(definition: ModelDef, target: Target) -> Iterator[tuple[tuple[int, ...], str]]:
    dims = traverse_util.flatten_dict(definition.dims, sep="/")
    return zip(part_shapes(definition, target), (dims[part].removeprefix("L") for part in target.parts))


def _bytes(definition: ModelDef, quantize: Quantize, shape: tuple[int, ...], dims: str) -> tuple[int, int]:
    """What a share is once it is made, and what it is made from beside that."""
    read = jax.ShapeDtypeStruct(shape, jnp.float32)
    made = jax.eval_shape(lambda a: stored(quantize, definition.config.dtype.value, a, dims), read)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))
    return nbytes, 0 if made == read else 4 * math.prod(shape)
