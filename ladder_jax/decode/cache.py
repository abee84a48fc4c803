"""The key/value cache: right-padded rows, one length a row."""

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


def dims(definition: Definition, *, loop: Loop) -> tuple[Cache, ...] | Cache:
    """The dimensions of `empty`'s arrays."""
    if loop is Loop.SCAN:
        return Cache("L" + DIMS, "L" + DIMS)
    return (Cache(DIMS, DIMS),) * definition.config.num_layers


def _zeros(shape: tuple[int, ...], dtype: str) -> Cache:
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def unstack(params: dict) -> dict:
    """Parameters with each layer's own arrays, which an unrolled loop reads without slicing a stack."""
    count = jax.tree.leaves(params["layers"])[0].shape[0]
    split = jax.jit(lambda stacked: tuple(jax.tree.map(lambda a: a[i], stacked) for i in range(count)))
    return {**params, "layers": split(params["layers"])}


def unstacked_dims(definition: Definition) -> dict:
    per_layer = jax.tree.map(lambda d: d.removeprefix("L"), definition.dims["layers"])
    return {**definition.dims, "layers": (per_layer,) * definition.config.num_layers}
