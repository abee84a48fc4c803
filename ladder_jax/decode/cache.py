"""The key/value cache: right-padded rows, one length a row."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop
from ladder_jax.nn import Cache, Definition

DIMS = "BSNH"
"""A cache is split over all ranks: with fewer key/value heads than ranks, several hold the same head."""


def empty(definition: Definition, *, rows: int, capacity: int, loop: Loop) -> tuple[Cache, ...] | Cache:
    """On one rank: zeros [rows, capacity, K, H] for each layer, or stacked [L, ...] for a scan."""
    config, layout = definition.config, definition.layout
    heads = max(1, config.num_kv_heads // layout.ranks)
    shape = (rows, capacity, heads, config.head_dim)
    if loop is Loop.SCAN:
        return _zeros((config.num_layers, *shape), config.dtype.value)
    return tuple(_zeros(shape, config.dtype.value) for _ in range(config.num_layers))


@functools.cache
def make(definition: Definition, *, rows: int, capacity: int, loop: Loop) -> Callable[[], tuple[Cache, ...] | Cache]:
    """A compiled () -> zeros for all ranks' caches of `rows` rows in all."""
    shapes = abstract(definition, rows=rows, capacity=capacity, loop=loop)
    zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))


def dims(definition: Definition, *, loop: Loop) -> tuple[Cache, ...] | Cache:
    """The dimensions of `empty`'s arrays."""
    if loop is Loop.SCAN:
        return Cache("L" + DIMS, "L" + DIMS)
    return (Cache(DIMS, DIMS),) * definition.config.num_layers


def _zeros(shape: tuple[int, ...], dtype: str) -> Cache:
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def abstract(definition: Definition, *, rows: int, capacity: int, loop: Loop) -> tuple[Cache, ...] | Cache:
    """Shapes, dtypes and shardings of all ranks' caches of `rows` rows in all, to compile for."""
    config, layout = definition.config, definition.layout
    lead = (config.num_layers,) if loop is Loop.SCAN else ()
    shape = (*lead, rows, capacity, max(config.num_kv_heads, layout.ranks), config.head_dim)
    place = lambda d: jax.ShapeDtypeStruct(shape, config.dtype.value, sharding=layout.sharding(d))
    return jax.tree.map(place, dims(definition, loop=loop))
