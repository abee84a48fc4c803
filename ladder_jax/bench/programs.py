"""What is run: random weights, made where they are used, and the greedy token loop."""

import functools
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ladder_jax import nn
from ladder_jax.config import Loop, Phase
from ladder_jax.decode import cache, sampling, weights
from ladder_jax.nn import Definition, Params
from ladder_jax.parallel import Compiled, on_mesh


def random_weights(definitions: Sequence[Definition]) -> list[Params]:
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


@functools.cache
def first_token(definition: Definition) -> jax.stages.Wrapped:
    """A compiled (logits [B, V]) -> the likeliest tokens [B]."""
    layout = definition.layout
    return jax.jit(on_mesh(_argmax(definition), layout=layout, in_dims=("BV",), out_dims="B"))


@functools.cache
def next_tokens(definition: Definition, *, count: int) -> Compiled:
    """A compiled (params, caches, tokens [B], lengths [B]) -> (new tokens [B, count], caches), greedily.

    All `count` decode steps run on the devices, without the host. The caches passed in are consumed.
    """
    argmax, layout = _argmax(definition), definition.layout

    def local(params, caches, tokens, lengths):
        def turn(carry, _):
            caches, tokens, lengths = carry
            settings = dict(loop_form=Loop.UNROLLED, caches=caches, place=nn.Next(lengths))
            x, caches = nn.hidden(definition, params, tokens[:, None], **settings)
            tokens = argmax(nn.logits(definition, params, x)[:, 0])
            return (caches, tokens, lengths + 1), tokens

        (caches, _, _), new = jax.lax.scan(turn, (caches, tokens, lengths), length=count)
        return new.T, caches

    dims = cache.dims(definition, loop=Loop.UNROLLED)
    in_dims = (weights.dims(definition, loop=Loop.UNROLLED), dims, "B", "B")
    meshed = on_mesh(local, layout=layout, in_dims=in_dims, out_dims=("BT", dims))
    traits = definition.traits(phase=Phase.DECODE, loop=Loop.UNROLLED)
    return Compiled(meshed, mesh=layout.mesh, traits=traits, donate_argnums=(1,))


def _argmax(definition: Definition):
    return functools.partial(sampling.argmax, axes=definition.layout.tensor)
