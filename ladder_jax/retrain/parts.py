"""A model's parameters with its lowest layers apart from the others, so that either can be frozen.

"lower" holds the stacked layers below a number of them, "layers" those from there on; an empty
stack is left out. All other modules keep their names. A side network is one part, "side": its ends,
and its blocks, which otherwise stand in the layers, as "layers" in it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.parameter import LAYERS
from ladder_jax.side import SIDE

LOWER = "lower"


def split(params: Params, *, below: int, layers: int) -> Params:
    """The parts of `params` (arrays, or their shapes), of a model with that many layers."""
    return _parts(params, below, layers, _sliced)


def split_dims(definition: ModelDef, *, below: int) -> Params:
    """The dimensions of every array in the parts."""
    return _parts(
        definition.dims, below, definition.config.num_layers, lambda dims, first, last: dims
    )


def join(parts: Params) -> Params:
    """The inverse of `split`."""
    stacks = [parts[name] for name in (LOWER, LAYERS) if name in parts]
    joined = stacks[0] if len(stacks) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *stacks)
    joined = {**{name: part for name, part in parts.items() if name != LOWER}, LAYERS: joined}
    return with_side(joined, joined[SIDE]) if SIDE in joined else joined


def with_side(params: Params, side: Params) -> Params:
    """`params` (or their dimensions), in whose layers there are no blocks, with the part `side`."""
    ends = {name: value for name, value in side.items() if name != LAYERS}
    return {**params, LAYERS: {**params[LAYERS], SIDE: side[LAYERS]}, SIDE: ends}


def _parts(params: Params, below: int, layers: int, take: Callable[[Any, int, int], Any]) -> Params:
    parts = {name: part for name, part in params.items() if name != LAYERS}
    stack = {name: group for name, group in params[LAYERS].items() if name != SIDE}
    if SIDE in parts:
        parts[SIDE] = {**parts[SIDE], LAYERS: params[LAYERS][SIDE]}
    if below == 0:
        return {**parts, LAYERS: stack}
    for name, first, last in ((LOWER, 0, below), (LAYERS, below, layers)):
        if first < last:
            parts[name] = jax.tree.map(lambda a: take(a, first, last), stack)
    return parts


def _sliced(array: Any, first: int, last: int) -> Any:
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            (last - first, *array.shape[1:]), array.dtype, sharding=array.sharding
        )
    return array[first:last]
