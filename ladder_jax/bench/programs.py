"""Random weights, created on the devices that use them."""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop
from ladder_jax.decode import weights
from ladder_jax.nn import ModelDef, Params


def random_weights(definitions: Sequence[ModelDef]) -> list[Params]:
    """Unrolled parameters of each definition in the compute dtype: gains of norms are 1, all others normal x 0.02.

    Each array is created in its dtype and sharding, without a float32 copy and without the host. Definitions share
    arrays of the same name, shape and sharding, because residuals differ in their connections, not in their weights.
    """
    arrays = {}

    def value(path, leaf):
        name = jax.tree_util.keystr(path)
        if (name, leaf) not in arrays:
            initialize = _initializer(leaf.shape, leaf.dtype, leaf.sharding, gain="scale" in name)
            arrays[name, leaf] = initialize(jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode())))
        return arrays[name, leaf]

    abstract = [weights.abstract(definition, loop=Loop.UNROLLED) for definition in definitions]
    return [jax.tree_util.tree_map_with_path(value, tree) for tree in abstract]


@functools.cache
def _initializer(shape, dtype, sharding, *, gain: bool):
    """A compiled function key -> array, cached, so that a model of many layers needs only a few programs."""
    initialize = lambda key: jnp.ones(shape, dtype) if gain else 0.02 * jax.random.normal(key, shape, dtype)
    return jax.jit(initialize, out_shardings=sharding)
