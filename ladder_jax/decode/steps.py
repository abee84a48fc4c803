"""Compiled prefill and decode: one shard_map each, caches updated in place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from ladder_jax import nn
from ladder_jax.config import Launch, Loop, Phase
from ladder_jax.decode import cache, sampling, weights
from ladder_jax.nn import Definition
from ladder_jax.parallel import Compiled, Overlap, Traits, explicit, on_mesh, over_ranks, vary


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
    traits = definition.traits(phase=Phase.PREFILL, loop=loop)
    return _compile(definition, local, traits=traits, in_dims=("BT", "B"), out_dims=out_dims)


@functools.cache
def decode(definition: Definition, *, loop: Loop = Loop.UNROLLED, launch: Launch = Launch.CHAINED) -> Compiled:
    """A compiled (params, caches, tokens [B], lengths [B]) -> (logits [B, V], caches), one position a row.

    Row b's token is written at position lengths[b]. The caches passed in are consumed. Raises UserError
    where `launch` is by name and this jax cannot.
    """

    def local(params, caches, tokens, lengths):
        return one(params, caches, tokens, lengths)

    one, dims = _one(definition, loop=loop, launch=launch), cache.dims(definition, loop=loop)
    in_dims, out_dims = (dims, "B", "B"), ("BV", dims)
    traits = _decode_traits(definition, loop=loop, launch=launch)
    return _compile(definition, local, traits=traits, in_dims=in_dims, out_dims=out_dims, donate=(1,))


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
def decode_many(
    definition: Definition, *, count: int, loop: Loop = Loop.UNROLLED, launch: Launch = Launch.CHAINED
) -> Compiled:
    """A compiled (params, caches, tokens, lengths, temperature, keys) -> (new tokens [B, count], caches).

    The token loop runs on the devices: `count` decode steps and samples without the host.
    """
    config, axes = definition.config, definition.layout.tensor

    def local(params, caches, tokens, lengths, temperature, keys):
        def turn(carry, _):
            caches, tokens, lengths = carry
            logits, caches = one(params, caches, tokens, lengths)
            lengths = lengths + 1
            tokens = sampling.sample(
                logits, temperature=temperature, keys=keys, positions=lengths, vocab_size=config.vocab_size, axes=axes
            )
            return (caches, tokens, lengths), tokens

        (caches, _, _), new = jax.lax.scan(turn, (caches, tokens, lengths), length=count)
        return new.T, caches

    one, dims = _one(definition, loop=loop, launch=launch), cache.dims(definition, loop=loop)
    in_dims, out_dims = (dims, "B", "B", "", "B"), ("BT", dims)
    traits = _decode_traits(definition, loop=loop, launch=launch)
    return _compile(definition, local, traits=traits, in_dims=in_dims, out_dims=out_dims, donate=(1,))


def _one(definition: Definition, *, loop: Loop, launch: Launch) -> Callable:
    """On one rank: (params, caches, tokens, lengths) -> (logits, caches)."""
    if definition.layout.ranks == 1 or definition.layout.emulated:
        launch = Launch.CHAINED  # nothing to launch
    if launch is Launch.EXPLICIT:
        explicit.check(definition.layout.mesh)

    def one(params, caches, tokens, lengths):
        settings = dict(loop_form=loop, caches=caches, lengths=lengths, launch=launch)
        x, caches = nn.hidden(definition, params, tokens[:, None], **settings)
        return nn.logits(definition, params, x)[:, 0], caches

    return one


def _decode_traits(definition: Definition, *, loop: Loop, launch: Launch) -> Traits:
    """What is launched by name needs no option to be overlapped, only the fastest reduction."""
    traits = definition.traits(phase=Phase.DECODE, loop=loop)
    return dataclasses.replace(traits, overlap=Overlap.WAITS) if launch is Launch.EXPLICIT else traits


def _compile(
    definition: Definition, local: Callable, *, traits: Traits, in_dims: tuple, out_dims: Any, donate: tuple = ()
) -> Compiled:
    in_dims, layout = (weights.dims(definition, loop=traits.loop), *in_dims), definition.layout
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    meshed = on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims=out_dims)
    return Compiled(meshed, mesh=layout.mesh, traits=traits, donate_argnums=donate)
