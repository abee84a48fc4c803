"""Compiled prefill and decode: one shard_map each, caches updated in place."""

import functools
from typing import Any

import jax

from ladder_jax import nn
from ladder_jax.config import Loop
from ladder_jax.decode import cache, sampling, weights
from ladder_jax.nn import Definition
from ladder_jax.parallel import Compiled, Size, on_mesh, over_ranks, vary


@functools.cache
def prefill(definition: Definition, *, capacity: int, loop: Loop = Loop.UNROLLED) -> Compiled:
    """A compiled (params, tokens [B, T], lengths [B]) -> (logits [B, V] after each row's last token, caches).

    Rows are right-padded; what lies beyond a row's length does not matter. The caches hold `capacity`
    positions a row. `params` are `weights.prepare`d.
    """

    def local(params, tokens, lengths):
        caches = cache.empty(definition, rows=tokens.shape[0], capacity=capacity, loop=loop)
        caches = jax.tree.map(lambda c: vary(c, definition.layout.all_axes), caches)
        x, caches = nn.hidden(definition, params, tokens, loop_form=loop, caches=caches)
        logits = nn.logits(definition, params, sampling.pick_last(x, lengths))
        return logits[:, 0], caches

    out_dims = ("BV", cache.dims(definition, loop=loop))
    return _compile(definition, local, size=Size.LARGE, loop=loop, in_dims=("BT", "B"), out_dims=out_dims)


@functools.cache
def decode(definition: Definition, *, loop: Loop = Loop.UNROLLED) -> Compiled:
    """A compiled (params, caches, tokens [B], lengths [B]) -> (logits [B, V], caches), one position a row.

    Row b's token is written at position lengths[b]. The caches passed in are consumed.
    """

    def local(params, caches, tokens, lengths):
        return _one(definition, params, caches, tokens, lengths, loop)

    dims = cache.dims(definition, loop=loop)
    in_dims, out_dims = (dims, "B", "B"), ("BV", dims)
    return _compile(definition, local, size=Size.SMALL, loop=loop, in_dims=in_dims, out_dims=out_dims, donate=(1,))


@functools.cache
def sample_first(definition: Definition) -> jax.stages.Wrapped:
    """A compiled (logits [B, V], temperature, keys [B], positions [B]) -> tokens [B]."""
    vocab = definition.config.vocab_size
    axes = definition.layout.tensor

    def local(logits, temperature, keys, positions):
        return sampling.sample(
            logits, temperature=temperature, keys=keys, positions=positions, vocab_size=vocab, axes=axes
        )

    in_dims, layout = ("BV", "", "B", "B"), definition.layout
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims="B")
    return jax.jit(on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims="B"))


@functools.cache
def decode_many(definition: Definition, *, count: int, loop: Loop = Loop.UNROLLED) -> Compiled:
    """A compiled (params, caches, tokens, lengths, temperature, keys) -> (new tokens [B, count], caches).

    The token loop runs on the devices: `count` decode steps and samples without the host.
    """
    config, axes = definition.config, definition.layout.tensor

    def local(params, caches, tokens, lengths, temperature, keys):
        def turn(carry, _):
            caches, tokens, lengths = carry
            logits, caches = _one(definition, params, caches, tokens, lengths, loop)
            lengths = lengths + 1
            tokens = sampling.sample(
                logits, temperature=temperature, keys=keys, positions=lengths, vocab_size=config.vocab_size, axes=axes
            )
            return (caches, tokens, lengths), tokens

        (caches, _, _), new = jax.lax.scan(turn, (caches, tokens, lengths), length=count)
        return new.T, caches

    dims = cache.dims(definition, loop=loop)
    in_dims, out_dims = (dims, "B", "B", "", "B"), ("BT", dims)
    return _compile(definition, local, size=Size.SMALL, loop=loop, in_dims=in_dims, out_dims=out_dims, donate=(1,))


def _one(definition: Definition, params: Any, caches: Any, tokens: jax.Array, lengths: jax.Array, loop: Loop):
    x, caches = nn.hidden(definition, params, tokens[:, None], loop_form=loop, caches=caches, lengths=lengths)
    return nn.logits(definition, params, x)[:, 0], caches


def _compile(
    definition: Definition,
    local: Any,
    *,
    size: Size,
    loop: Loop,
    in_dims: tuple,
    out_dims: Any,
    donate: tuple[int, ...] = (),
) -> Compiled:
    in_dims, layout = (weights.dims(definition, loop=loop), *in_dims), definition.layout
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    meshed = on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims=out_dims)
    traits = definition.traits(size=size, loop=loop)
    return Compiled(meshed, mesh=layout.mesh, traits=traits, donate_argnums=donate)
