"""Arrays copied to their devices piece by piece: one device's shard, or one layer, at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]


def place(part: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> jax.Array:
    """The array of `shape` whose shards `part(index)` returns, one after another, padded with zeros at the end.

    A device may keep using the memory of the returned array, which therefore must not change afterwards.
    """
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        values = part(index)
        missing = [(0, len(range(*where.indices(n))) - have) for where, n, have in zip(index, shape, values.shape)]
        values = np.pad(values, missing) if any(after for _, after in missing) else values
        shards.append(jax.device_put(values, device).block_until_ready())
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def put(stack: Any, layer: Any, index: int) -> Any:
    """`stack` [L, ...], an array or a tree of them, with `layer` written at `index`; the given stack is consumed."""
    return jax.tree.map(lambda s, a: jax.lax.dynamic_update_index_in_dim(s, a, index, 0), stack, layer)
