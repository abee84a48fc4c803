"""Compiled prefill and decode: one shard_map each, caches updated in place."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ladder_jax import nn
from ladder_jax.config import Launch, Loop, Phase, Quantize
from ladder_jax.decode import cache, sampling, weights
from ladder_jax.decode.sampling import Choice, Settings
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef
from ladder_jax.parallel import Compiled, Overlap, Traits, explicit, on_mesh, over_ranks, pvary
from ladder_jax.parallel.collectives import TOKEN_LOOP

CHUNK = 16  # tokens a compiled call: one host round trip for as many


@functools.cache
def prefill(
    definition: ModelDef,
    *,
    capacity: int,
    loop: Loop = Loop.UNROLLED,
    quantize: Quantize = Quantize.NONE,
    sequence_parallel: bool = False,
) -> Compiled:
    """A compiled (params, tokens [B, T], lengths [B]) -> (logits [B, V] after each row's last token, caches).

    Rows are right-padded; what lies beyond a row's length does not matter. The caches hold `capacity`
    positions a row. `params` are `weights.prepare`d, for the same loop and quantize.
    With `sequence_parallel`, T is divisible by the tensor ranks: see residual/sequence.py.
    """

    def local(params, tokens, lengths):
        caches = cache.empty(definition, rows=tokens.shape[0], capacity=capacity, loop=loop)
        caches = jax.tree.map(lambda c: pvary(c, definition.layout.all_axes), caches)
        settings = dict(loop_form=loop, caches=caches, sequence_parallel=sequence_parallel)
        x, caches = nn.hidden(definition, params, tokens, **settings)
        logits = nn.logits(definition, params, sampling.pick_last(x, lengths))
        return logits[:, 0], caches

    out_dims = ("BV", cache.dims(definition, loop=loop))
    traits = definition.traits(phase=Phase.PREFILL, loop=loop, sequence_parallel=sequence_parallel)
    return _compile(definition, local, quantize, traits=traits, in_dims=("BT", "B"), out_dims=out_dims)


@functools.cache
def extend(definition: ModelDef, *, loop: Loop = Loop.UNROLLED, quantize: Quantize = Quantize.NONE) -> Compiled:
    """A compiled (params, caches, tokens [B, T], start, lengths [B]) -> (logits [B, V], caches): a part of the prompts.

    The tokens stand at positions start..start+T-1 of every row, `start` an int32 scalar; the caches hold what comes
    before, have room for all T, and are consumed. A row's logits are those after its last token where this
    block holds it, and mean nothing where not. What lies beyond a row's length does not matter.
    """

    def local(params, caches, tokens, start, lengths):
        x, caches = nn.hidden(
            definition, params, tokens, loop_form=loop, caches=caches, positions=nn.ChunkedPrefill(start)
        )
        inside = jnp.clip(lengths - start, 1, tokens.shape[1])
        return nn.logits(definition, params, sampling.pick_last(x, inside))[:, 0], caches

    dims = cache.dims(definition, loop=loop)
    traits = definition.traits(phase=Phase.PREFILL, loop=loop)
    in_dims, out_dims = (dims, "BT", "", "B"), ("BV", dims)
    return _compile(definition, local, quantize, traits=traits, in_dims=in_dims, out_dims=out_dims, donate=(1,))


@functools.cache
def seen_in(definition: ModelDef) -> jax.stages.Wrapped:
    """A compiled (tokens [B, T], lengths [B]) -> seen [B, V] bool: the tokens of right-padded rows."""
    size = nn.padded_vocabulary(definition.config.vocab_size, ranks=definition.layout.ranks) // definition.layout.ranks
    local = functools.partial(sampling.seen_of, size=size, axes=definition.layout.tensor)
    return _jit(definition, local, in_dims=("BT", "B"), out_dims="BV")


@functools.cache
def sample_first(definition: ModelDef) -> jax.stages.Wrapped:
    """A compiled (logits [B, V], settings, positions [B], seen [B, V]) -> (tokens [B], log-probabilities [B])."""

    def local(logits, settings, positions, seen):
        asked = sampling.Asked.of(settings)
        return sample(logits, settings=settings, asked=asked, positions=positions, seen_BV=seen)

    sample = _sampler(definition)
    return _jit(definition, local, in_dims=("BV", sampling.DIMS, "B", "BV"), out_dims=("B", "B"))


@functools.cache
def decode_many(
    definition: ModelDef,
    *,
    count: int = CHUNK,
    choice: Choice = Choice.SAMPLED,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.CHAINED,
    quantize: Quantize = Quantize.NONE,
) -> Compiled:
    """A compiled (params, caches, seen [B, V], tokens [B], lengths [B], settings)
    -> (new tokens [B, count], log-probabilities [B, count], caches, seen).

    All that decodes runs this. The token loop runs on the devices: `count` decode steps and choices without the host.
    Row b's token is written at position lengths[b]. Like the caches, `seen` is of what came before `tokens`, and
    is consumed. With Choice.GREEDY there are no log-probabilities (None), and of the settings only the penalty counts:
    each token takes the layers' collectives, the embedding's and one to choose. With SAMPLED, one more where a row is
    cut (see `candidates`).

    Raises UserError where `launch` is by name and this jax cannot, or the weights are quantised.
    """
    axes = definition.layout.tensor

    def local(params, caches, seen, tokens, lengths, settings):
        asked = None if choice is Choice.GREEDY else sampling.Asked.of(settings)

        def choose(logits, positions, seen):
            if choice is Choice.GREEDY:
                return sampling.greedy(logits, settings=settings, seen_BV=seen, axes=axes), None
            return sample(logits, settings=settings, asked=asked, positions=positions, seen_BV=seen)

        def turn(carry, _):
            caches, seen, tokens, lengths = carry
            logits, caches = one(params, caches, tokens, lengths)
            # Whoever chooses, the step before is compiled alike: a neighbour's settings must not decide a near tie.
            logits = jax.lax.optimization_barrier(logits)
            lengths, seen = lengths + 1, sampling.mark(seen, tokens, axes=axes)
            tokens, logprobs = choose(logits, lengths, seen)
            return (caches, seen, tokens, lengths), (tokens, logprobs)

        with jax.named_scope(TOKEN_LOOP):
            (caches, seen, _, _), new = jax.lax.scan(turn, (caches, seen, tokens, lengths), length=count)
        return *jax.tree.map(jnp.transpose, new), caches, seen

    one, dims = step(definition, loop=loop, launch=launch, quantize=quantize), cache.dims(definition, loop=loop)
    sample = _sampler(definition)
    in_dims = (dims, "BV", "B", "B", sampling.DIMS)
    out_dims = ("BT", None if choice is Choice.GREEDY else "BT", dims, "BV")
    traits = _decode_traits(definition, loop=loop, launch=launch)
    return _compile(definition, local, quantize, traits=traits, in_dims=in_dims, out_dims=out_dims, donate=(1, 2))


def abstract(
    definition: ModelDef, *, rows: int, positions: int, loop: Loop, quantize: Quantize = Quantize.NONE
) -> tuple[Any, ...]:
    """Shapes, dtypes and shardings of `decode_many`'s arguments, for `rows` rows of `positions` cached positions."""
    sharding = definition.layout.sharding
    vocabulary = nn.padded_vocabulary(definition.config.vocab_size, ranks=definition.layout.ranks)
    integers = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding("B"))
    seen = jax.ShapeDtypeStruct((rows, vocabulary), bool, sharding=sharding("BV"))
    settings = jax.eval_shape(lambda: Settings.of(jnp.broadcast_to(jax.random.key(0), (rows,))))
    settings = jax.tree.map(lambda a: a.update(sharding=sharding(sampling.DIMS)), settings)
    params = weights.abstract(definition, loop=loop, quantize=quantize)
    caches = cache.abstract(definition, rows=rows, capacity=positions, loop=loop)
    return params, caches, seen, integers, integers, settings


def _sampler(definition: ModelDef) -> Callable:
    """`sampling.sample` for this model, on one rank."""
    return functools.partial(sampling.sample, vocab_size=definition.config.vocab_size, axes=definition.layout.tensor)


def _jit(definition: ModelDef, local: Callable, *, in_dims: tuple, out_dims: Any) -> jax.stages.Wrapped:
    """What reads no parameters and reduces next to nothing: no options to choose."""
    layout = definition.layout
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    meshed = on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims=out_dims)
    return jax.jit(meshed, out_shardings=jax.tree.map(layout.sharding, out_dims))


def step(
    definition: ModelDef,
    *,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.CHAINED,
    quantize: Quantize = Quantize.NONE,
) -> Callable:
    """On one rank: (params, caches, tokens [B], lengths [B]) -> (logits [B, V/ranks], caches), one position a row.

    Raises UserError as `decode_many`.
    """
    if definition.layout.ranks == 1 or definition.layout.emulated:
        launch = Launch.CHAINED  # nothing to launch
    if launch is Launch.EXPLICIT:
        if quantize is not Quantize.NONE:  # in order means unfused: bfloat16 copies of the matrices, 14 % more bytes
            raise UserError(
                f"launch 'explicit' would undo quantize={quantize.value!r}: use 'chained', or quantize='none'"
            )
        explicit.check(definition.layout.mesh)

    def one(params, caches, tokens, lengths):
        settings = dict(loop_form=loop, caches=caches, positions=nn.DecodeStep(lengths), launch=launch)
        x, caches = nn.hidden(definition, params, tokens[:, None], **settings)
        return nn.logits(definition, params, x)[:, 0], caches

    return one


def _decode_traits(definition: ModelDef, *, loop: Loop, launch: Launch) -> Traits:
    """What is launched by name needs no option to be overlapped, only the fastest reduction."""
    traits = definition.traits(phase=Phase.DECODE, loop=loop)
    return dataclasses.replace(traits, overlap=Overlap.WAITS) if launch is Launch.EXPLICIT else traits


def _compile(
    definition: ModelDef,
    local: Callable,
    quantize: Quantize,
    *,
    traits: Traits,
    in_dims: tuple,
    out_dims: Any,
    donate: tuple = (),
) -> Compiled:
    in_dims, layout = (weights.dims(definition, loop=traits.loop, quantize=quantize), *in_dims), definition.layout
    ranked = over_ranks(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    meshed = on_mesh(ranked, layout=layout, in_dims=in_dims, out_dims=out_dims)
    # Said again, as jax leaves axes of one device out of what it infers: a call takes what the one before it gave.
    out_shardings = jax.tree.map(layout.sharding, out_dims)
    return Compiled(meshed, mesh=layout.mesh, traits=traits, donate_argnums=donate, out_shardings=out_shardings)
