"""The key/value cache: right-padded rows, one length a row; and to which lengths prompts and caches are padded.

The cache is split over all ranks; with fewer key/value heads than ranks, several ranks hold the same head. The order of
its dimensions in memory is the attention kernel's: `ModelDef.kernel.cache_dims`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop
from ladder_jax.nn import Cache, ModelDef

UNIT = 32  # the shortest padded prompt, and the unit of a cache's length, in tokens


def positions_for(tokens: int, *, chunk: int) -> int:
    """The length of a cache for rows of `tokens` tokens, prompt and new ones together, decoded `chunk` at a time.

    A row may end anywhere in a chunk, and the program goes on to the chunk's end. With room for that nothing is written
    out of range, which jax would drop silently.
    """
    return -(-(tokens + chunk) // UNIT) * UNIT


def padded_length(length: int, *, positions: int) -> int:
    """The length to which a prompt is padded, a power of two, so that few shapes are compiled; at most `positions`."""
    return min(max(UNIT, 1 << (length - 1).bit_length()), positions)


def empty(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> tuple[Cache, ...] | Cache:
    """On one rank: zeros for `rows` rows of at least `capacity` positions, one cache a layer, or stacked for a scan."""
    heads = max(1, definition.config.num_kv_heads // definition.layout.ranks)
    shape = _shape(definition, rows=rows, capacity=capacity, heads=heads, loop=loop)
    zeros = lambda _: jnp.zeros(shape, definition.config.dtype.value)
    return jax.tree.map(zeros, dims(definition, loop=loop))


@functools.cache
def make(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> Callable[[], tuple[Cache, ...] | Cache]:
    """A compiled () -> zeros for the caches of all ranks, `rows` rows in total."""
    shapes = abstract(definition, rows=rows, capacity=capacity, loop=loop)
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))


def dims(definition: ModelDef, *, loop: Loop) -> tuple[Cache, ...] | Cache:
    """The dimensions of `empty`'s arrays."""
    each = definition.kernel.cache_dims
    if loop is Loop.SCAN:
        return Cache("L" + each, "L" + each)
    return (Cache(each, each),) * definition.config.num_layers


def abstract(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> tuple[Cache, ...] | Cache:
    """Shapes, dtypes and shardings of the caches of all ranks, `rows` rows in total."""
    config, layout = definition.config, definition.layout
    heads = max(config.num_kv_heads, layout.ranks)
    shape = _shape(definition, rows=rows, capacity=capacity, heads=heads, loop=loop)
    place = lambda d: jax.ShapeDtypeStruct(shape, config.dtype.value, sharding=layout.sharding(d))
    return jax.tree.map(place, dims(definition, loop=loop))


def _shape(definition: ModelDef, *, rows: int, capacity: int, heads: int, loop: Loop) -> tuple[int, ...]:
    page = definition.kernel.page
    sizes = dict(B=rows, S=-(-capacity // page) * page, N=heads, H=definition.config.head_dim)
    lead = (definition.config.num_layers,) if loop is Loop.SCAN else ()
    return (*lead, *(sizes[dim] for dim in definition.kernel.cache_dims))
