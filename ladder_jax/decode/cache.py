"""The key/value cache: right-padded rows, one length a row; and to which lengths prompts and caches are padded.

The cache is split over all ranks; with fewer key/value heads than ranks, several ranks hold the same head. The order of
its dimensions in memory is the attention kernel's: `ModelDef.kernel.cache_dims`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop, ModelConfig
from ladder_jax.nn import Cache, ModelDef
from ladder_jax.nn.attention import Kernel
from ladder_jax.parallel import pvary

Caches = tuple[Cache, ...] | Cache  # one a layer, or stacked for a scan

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


def empty(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> Caches:
    """On one rank: zeros for `rows` rows of at least `capacity` positions, one cache a layer, or stacked for a scan."""
    sizes, ranks = dict(rows=rows, capacity=capacity), definition.layout.ranks

    def zeros(config: ModelConfig, kernel: Kernel, dims: str) -> jax.Array:
        shape = _shape(config, kernel, dims, heads=max(1, config.num_kv_heads // ranks), **sizes)
        return pvary(jnp.zeros(shape, config.dtype.value), definition.layout.own_axes(dims))

    return _caches(definition, zeros, loop=loop)


@functools.cache
def make(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> Callable[[], Caches]:
    """A compiled () -> zeros for the caches of all ranks, `rows` rows in total."""
    shapes = abstract(definition, rows=rows, capacity=capacity, loop=loop)
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))


def dims(definition: ModelDef, *, loop: Loop) -> Caches:
    """The dimensions of `empty`'s arrays."""
    return _caches(definition, lambda config, kernel, dims: dims, loop=loop)


def abstract(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> Caches:
    """Shapes, dtypes and shardings of the caches of all ranks, `rows` rows in total."""
    sizes, layout = dict(rows=rows, capacity=capacity), definition.layout

    def place(config: ModelConfig, kernel: Kernel, dims: str) -> jax.ShapeDtypeStruct:
        shape = _shape(config, kernel, dims, heads=max(config.num_kv_heads, layout.ranks), **sizes)
        return jax.ShapeDtypeStruct(shape, config.dtype.value, sharding=layout.sharding(dims))

    return _caches(definition, place, loop=loop)


def _caches(definition, leaf, *, loop):
    """A cache a layer, or one for all, of what `leaf` makes of a model, its kernel and a cache's dimensions."""
    if loop is Loop.SCAN:
        return definition.cache(lambda config, kernel, dims: leaf(config, kernel, "L" + dims))
    return tuple(definition.cache(leaf) for _ in range(definition.config.num_layers))


def _shape(config, kernel, dims, *, rows, capacity, heads):
    heads = config.num_kv_heads if "n" in dims else heads  # a small letter is whole on every rank
    positions = -(-capacity // kernel.page) * kernel.page
    sizes = dict(L=config.num_layers, B=rows, S=positions, N=heads, H=config.head_dim)
    return tuple(sizes[dim.upper()] for dim in dims)
