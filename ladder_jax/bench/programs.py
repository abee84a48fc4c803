"""Random weights, made where they are used."""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ladder_jax.config import Loop
from ladder_jax.decode import weights
from ladder_jax.nn import ModelDef, Params


def random_weights(definitions: Sequence[ModelDef]) -> list[Params]:
    """For each definition unrolled parameters in the compute dtype: norms' gains 1, all else normal x 0.02.

    Each array is made sharded, in its dtype: no float32 copy, no host. Arrays of the same name, shape and
    sharding are one array: residuals differ in their wiring, not in their weights.
    """
    made = {}

    def value(path, leaf):
        name = jax.tree_util.keystr(path)
        if (name, leaf) not in made:
            make = _initializer(leaf.shape, leaf.dtype, leaf.sharding, gain="scale" in name)
            made[name, leaf] = make(jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode())))
        return made[name, leaf]

    abstract = [weights.abstract(definition, loop=Loop.UNROLLED) for definition in definitions]
    return [jax.tree_util.tree_map_with_path(value, tree) for tree in abstract]


@functools.cache
def _initializer(shape, dtype, sharding, *, gain: bool):
    """key -> array. Kept by shape, so that a few programs make a model of many layers."""
    make = lambda key: jnp.ones(shape, dtype) if gain else 0.02 * jax.random.normal(key, shape, dtype)
    return jax.jit(make, out_shardings=sharding)
