"""The compiled programs of inference: prefill, whole or in chunks, and decode, a chunk of tokens a
call; and the key/value cache that they hand on, and update in place.

Layers are unrolled, or scanned to compile sooner. A scanned decode step takes 63 to 76 % more
estimated cycles, because XLA slices and copies the stacks (`ladder-jax overlap --model llama-3-70b
--layers 4 --phase decode --residual ladder --loop scan`, against unrolled, on v5p, v6e, v5e and
tpu7x).

A cache has right-padded rows, one length a row. It is split over all ranks; with fewer key/value
heads than ranks, several ranks hold the same head. The order of its dimensions in memory is the
attention kernel's: `ModelDef.kernel.cache_dims`.
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ladder_jax import nn
from ladder_jax.config import (
    UNROLLED,
    CollectiveMatmul,
    Execution,
    Launch,
    Loop,
    ModelConfig,
    Phase,
    Quantize,
)
from ladder_jax.config.fields import check, member
from ladder_jax.decode import sampling, weights
from ladder_jax.decode.sampling import Choice, Settings
from ladder_jax.nn import Cache, ModelDef, Params
from ladder_jax.nn.attention import Kernel
from ladder_jax.nn.parameter import root_key
from ladder_jax.parallel import (
    Compiled,
    Overlap,
    Traits,
    apart,
    cache_programs,
    on_mesh,
    over_ranks,
    pvary,
    rank,
    resolve_launch,
)
from ladder_jax.scopes import TOKEN_LOOP

CHUNK = 16  # tokens a call of `decode_many`, without a round trip to the host between them
Caches = tuple[Cache, ...] | Cache  # one a layer, or stacked for a scan

UNIT = 32  # the shortest padded prompt, and the unit of a cache's length, in tokens


@cache_programs
def prefill(
    definition: ModelDef,
    *,
    capacity: int,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.AUTO,
    quantize: Quantize = Quantize.NONE,
    sequence_parallel: bool = False,
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE,
    interleave: int = 1,
) -> Compiled:
    """A compiled (params, tokens [B, T], lengths [B]) -> (logits [B, V] after each row's last
    token, caches).

    Rows are right-padded; tokens beyond a row's length have no effect. The caches hold `capacity`
    positions a row. `params` are `weights.prepare`d, for the same loop and quantize. With
    `sequence_parallel`, T is divisible by the tensor ranks: see residual/wires/sequence.py. Raises
    UserError where `launch` is explicit and is not supported, and for a `capacity` below T.
    """
    execution = _execution(
        definition,
        loop=loop,
        launch=launch,
        sequence_parallel=sequence_parallel,
        collective_matmul=collective_matmul,
        interleave=interleave,
    )

    layout = definition.layout
    zeros = lambda shape, dtype, dims: pvary(jnp.zeros(shape, dtype), layout.own_axes(dims))

    def local(params, tokens, lengths):
        _check_room(capacity, tokens.shape[1])
        caches = _caches(
            definition,
            zeros,
            loop=execution.loop,
            rows=tokens.shape[0],
            capacity=capacity,
            shares=layout.ranks,
        )
        x, caches = nn.hidden(
            definition,
            weights.by_layer(definition, params, loop=execution.loop),
            tokens,
            execution=execution,
            caches=caches,
            positions=nn.FullSequence(lengths),
        )
        return _last_logits(definition, params, x, lengths), caches

    return compiled(
        definition,
        local,
        in_dims=(weights.dims(definition, loop=execution.loop, quantize=quantize), "BT", "B"),
        out_dims=("BV", cache_dims(definition, loop=execution.loop)),
        traits=definition.traits(execution, phase=Phase.PREFILL),
    )


@cache_programs
def extend(
    definition: ModelDef,
    *,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.AUTO,
    quantize: Quantize = Quantize.NONE,
    interleave: int = 1,
) -> Compiled:
    """A compiled (params, caches, tokens [B, T], start, lengths [B]) -> (logits [B, V], caches):
    one chunk of prompts.

    The tokens are at positions start..start+T-1 of every row, `start` an int32 scalar. The caches,
    which are donated, hold the positions before `start` and have room for all T. A row's logits are
    those after its last token if this chunk holds it, otherwise meaningless. Tokens beyond a row's
    length have no effect. Raises UserError as `prefill`.
    """
    execution = _execution(definition, loop=loop, launch=launch, interleave=interleave)

    def local(params, caches, tokens, start, lengths):
        x, caches = nn.hidden(
            definition,
            weights.by_layer(definition, params, loop=execution.loop),
            tokens,
            execution=execution,
            caches=caches,
            positions=nn.ChunkedPrefill(start),
        )
        inside = jnp.clip(lengths - start, 1, tokens.shape[1])
        return _last_logits(definition, params, x, inside), caches

    params_dims = weights.dims(definition, loop=execution.loop, quantize=quantize)
    dims = cache_dims(definition, loop=execution.loop)
    return compiled(
        definition,
        local,
        in_dims=(params_dims, dims, "BT", "", "B"),
        out_dims=("BV", dims),
        traits=definition.traits(execution, phase=Phase.PREFILL),
        donate=(1,),
    )


def prefill_in_chunks(*args: Any, **settings: Any) -> tuple[jax.Array, Any]:
    """All of `prefill_chunks` at once: (logits [B, V] after each row's last token, caches)."""
    return run_to_end(prefill_chunks(*args, **settings))


def prefill_chunks(
    definition: ModelDef,
    params: Params,
    tokens: np.ndarray,
    lengths: np.ndarray,
    *,
    capacity: int,
    chunk: int,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.AUTO,
    quantize: Quantize = Quantize.NONE,
    interleave: int = 1,
) -> Generator[None, None, tuple[jax.Array, Any]]:
    """`prefill` of at most `chunk` tokens a row per `next`, so that others can compute in between;
    it returns the same.

    tokens [B, T], lengths [B]: right-padded, on the host. Up to `chunk` tokens are one prefill.
    Longer prompts run one program of `chunk` tokens repeatedly: neither its compilation, nor its
    activations and attention scores grow with the prompt. Raises UserError where the caches have
    no room for the tokens.
    """
    form = dict(loop=loop, launch=launch, quantize=quantize)
    sharding = definition.layout.sharding
    ends = jax.device_put(lengths, sharding("B"))
    if tokens.shape[1] <= chunk:
        program = prefill(definition, capacity=capacity, interleave=interleave, **form)
        return program(params, jax.device_put(tokens, sharding("BT")), ends)
    length = max(int(lengths.max()), chunk)  # the rest is padding in every row
    _check_room(capacity, length)  # jax would write the last chunk over the one before
    program = extend(definition, interleave=interleave, **form)
    caches = make_cache(definition, rows=len(tokens), capacity=capacity, loop=loop)()
    logits = None
    for start in range(0, length, chunk):
        if logits is not None:
            yield
        # The last chunk ends with the tokens and overlaps the one before, writing the same values
        # again: padding it would cost as much compute, and positions in the cache.
        start = min(start, length - chunk)
        part = tokens[:, start : start + chunk]
        part = jax.device_put(part, sharding("BT"))
        new, caches = program(params, caches, part, np.int32(start), ends)
        # A row's logits are those of the last chunk that begins before its end: that chunk holds
        # its last token.
        logits = new if logits is None else _replace_rows(definition)(new, logits, lengths > start)
    return logits, caches


def _check_room(capacity, length):
    check(capacity >= length, f"a cache of {capacity} positions has no room for {length} tokens")


def run_to_end[T](generator: Generator[None, None, T]) -> T:
    """What the generator returns, after all its steps."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


@cache_programs
def _replace_rows(definition):
    """A compiled (new [B, V], old [B, V], replaced [B] bool) -> [B, V]."""
    local = lambda new, old, replaced: jnp.where(replaced[:, None], new, old)
    return compiled(definition, local, in_dims=("BV", "BV", "B"), out_dims="BV")


@cache_programs
def seen_in(definition: ModelDef) -> Callable:
    """A compiled (tokens [B, T], lengths [B]) -> seen [B, V] bool: the tokens that right-padded
    rows hold.
    """
    layout = definition.layout
    size = nn.padded_vocabulary(definition.config.vocab_size, ranks=layout.ranks) // layout.ranks

    def local(tokens_BT, lengths_B):
        rows, length = tokens_BT.shape
        column = tokens_BT - rank(layout.tensor) * size
        mine = (column >= 0) & (column < size)
        mine = mine & (jnp.arange(length)[None] < lengths_B[:, None])
        # the last column is for other ranks' tokens and padding
        nowhere = jnp.zeros((rows, size + 1), bool)
        row = jnp.arange(rows)[:, None]
        return nowhere.at[row, jnp.where(mine, column, size)].set(True)[:, :size]

    return compiled(definition, local, in_dims=("BT", "B"), out_dims="BV")


@cache_programs
def sample_first(definition: ModelDef, *, choice: Choice = Choice.SAMPLED) -> Callable:
    """A compiled (logits [B, V], settings, positions [B], seen [B, V]) -> (tokens [B],
    log-probabilities [B] or None).

    With Choice.GREEDY as in `decode_many`: no log-probabilities, and of the settings only the
    penalty counts.
    """
    choice = member(Choice, "choice", choice)

    def local(logits, settings, positions, seen):
        return _chooser(definition, choice, settings)(logits, positions, seen)

    out_dims = ("B", None if choice is Choice.GREEDY else "B")
    return compiled(definition, local, in_dims=("BV", sampling.DIMS, "B", "BV"), out_dims=out_dims)


@cache_programs
def decode_many(
    definition: ModelDef,
    *,
    count: int = CHUNK,
    choice: Choice = Choice.SAMPLED,
    loop: Loop = Loop.UNROLLED,
    launch: Launch = Launch.AUTO,
    quantize: Quantize = Quantize.NONE,
) -> Compiled:
    """A compiled (params, caches, seen [B, V], tokens [B], lengths [B], settings)
    -> (new tokens [B, count], log-probabilities [B, count], caches, seen).

    The token loop of generation, serving, benchmarks and audits: `count` decode steps and choices
    without the host. Row b's token is written at position lengths[b]. The caches and `seen` hold
    what comes before `tokens`; both are donated. With Choice.GREEDY there are no log-probabilities
    (None), and of the settings only the penalty counts: a token takes the layers' collectives, the
    embedding's and one to choose. With SAMPLED, a token for which a row uses a filter takes one
    more (see sampling.py).

    Raises UserError where `launch` is explicit and is not supported.
    """
    choice = member(Choice, "choice", choice)
    axes = definition.layout.tensor
    execution = _execution(definition, loop=loop, launch=launch)

    def local(params, caches, seen, tokens, lengths, settings):
        choose = _chooser(definition, choice, settings)
        # before the loop, which would slice the gains again for every token
        params = weights.by_layer(definition, params, loop=execution.loop)

        def turn(carry, _):
            caches, seen, tokens, lengths = carry
            logits, caches = one(params, caches, tokens, lengths)
            # The barrier keeps the choice from being fused into the step: both choices then compute
            # the same logits, and a neighbour's settings cannot decide a near tie.
            logits = jax.lax.optimization_barrier(logits)
            lengths = lengths + 1
            seen = sampling.mark(seen, tokens, axes=axes)
            tokens, logprobs = choose(logits, lengths, seen)
            return (caches, seen, tokens, lengths), (tokens, logprobs)

        with jax.named_scope(TOKEN_LOOP):
            (caches, seen, _, _), new = jax.lax.scan(
                turn, (caches, seen, tokens, lengths), length=count
            )
        return *jax.tree.map(jnp.transpose, new), caches, seen

    one = step(definition, execution=execution)
    params_dims = weights.dims(definition, loop=execution.loop, quantize=quantize)
    dims = cache_dims(definition, loop=execution.loop)
    return compiled(
        definition,
        local,
        in_dims=(params_dims, dims, "BV", "B", "B", sampling.DIMS),
        out_dims=("BT", None if choice is Choice.GREEDY else "BT", dims, "BV"),
        traits=definition.traits(execution, phase=Phase.DECODE),
        donate=(1, 2),
    )


def abstract(
    definition: ModelDef,
    *,
    rows: int,
    positions: int,
    loop: Loop,
    quantize: Quantize = Quantize.NONE,
) -> tuple[Any, ...]:
    """Shapes, dtypes and shardings of `decode_many`'s arguments, for `rows` rows of `positions`
    cached positions.
    """
    sharding = definition.layout.sharding
    vocabulary = nn.padded_vocabulary(definition.config.vocab_size, ranks=definition.layout.ranks)
    integers = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding("B"))
    seen = jax.ShapeDtypeStruct((rows, vocabulary), bool, sharding=sharding("BV"))
    settings = jax.eval_shape(lambda: Settings.of(jnp.broadcast_to(root_key(0), (rows,))))
    settings = jax.tree.map(lambda a: a.update(sharding=sharding(sampling.DIMS)), settings)
    params = weights.abstract(definition, loop=loop, quantize=quantize)
    caches = abstract_cache(definition, rows=rows, capacity=positions, loop=loop)
    return params, caches, seen, integers, integers, settings


def positions_for(tokens: int, *, chunk: int) -> int:
    """The length of a cache for rows of `tokens` tokens, prompt and new ones together, decoded
    `chunk` at a time.

    A row may end anywhere in a chunk, and the program goes on to the chunk's end. With room for
    that nothing is written out of range, which jax would drop silently.
    """
    return -(-(tokens + chunk) // UNIT) * UNIT


def padded_length(length: int, *, positions: int) -> int:
    """The length to which a prompt is padded, a power of two, so that few shapes are compiled; at
    most `positions`.
    """
    return min(max(UNIT, 1 << (length - 1).bit_length()), positions)


@cache_programs
def make_cache(
    definition: ModelDef, *, rows: int, capacity: int, loop: Loop
) -> Callable[[], Caches]:
    """A compiled () -> zeros for the caches of all ranks, `rows` rows in total."""
    shapes = abstract_cache(definition, rows=rows, capacity=capacity, loop=loop)
    zeros = lambda: jax.tree.map(jnp.zeros_like, shapes)
    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))


def cache_dims(definition: ModelDef, *, loop: Loop) -> Caches:
    """The dimensions of the caches' arrays: one cache a layer, or stacked for a scan."""
    return _caches(definition, lambda shape, dtype, dims: dims, loop=loop, rows=1, capacity=1)


def abstract_cache(definition: ModelDef, *, rows: int, capacity: int, loop: Loop) -> Caches:
    """Shapes, dtypes and shardings of the caches of all ranks, `rows` rows in total."""
    place = lambda shape, dtype, dims: jax.ShapeDtypeStruct(
        shape, dtype, sharding=definition.layout.sharding(dims)
    )
    return _caches(definition, place, loop=loop, rows=rows, capacity=capacity)


def _caches(definition, leaf, *, loop, rows, capacity, shares=1):
    """A cache a layer, or one for all, of `leaf`(shape, dtype, dimensions). shares: into how many
    the heads are divided.
    """
    loop = member(Loop, "loop", loop)

    def array(config: ModelConfig, kernel: Kernel, dims: str) -> Any:
        dims = f"L{dims}" if loop is Loop.SCAN else dims
        heads = max(config.num_kv_heads, definition.layout.ranks) // shares
        sizes = dict(
            L=config.num_layers,
            B=rows,
            S=-(-capacity // kernel.page) * kernel.page,
            N=heads,
            n=config.num_kv_heads,  # whole on every rank
            H=config.head_dim,
        )
        return leaf(tuple(sizes[dim] for dim in dims), config.dtype.value, dims)

    if loop is Loop.SCAN:
        return definition.cache(array)
    return tuple(definition.cache(array) for _ in range(definition.config.num_layers))


def step(definition: ModelDef, *, execution: Execution = UNROLLED) -> Callable:
    """On one rank: (params, caches, tokens [B], lengths [B]) -> (logits [B, V/ranks], caches), one
    position a row.

    params: as `weights.by_layer` has them.
    """

    def one(params, caches, tokens, lengths):
        x, caches = nn.hidden(
            definition,
            params,
            tokens[:, None],
            execution=execution,
            caches=caches,
            positions=nn.DecodeStep(lengths),
        )
        return nn.logits(definition, params, x)[:, 0], caches

    return one


def _chooser(definition, choice, settings):
    """(logits, positions, seen) -> (tokens, log-probabilities or None), on one rank."""
    common = dict(settings=settings, axes=definition.layout.tensor)
    if choice is Choice.GREEDY:

        def choose(logits, positions, seen):
            return sampling.greedy(logits, seen_BV=seen, **common), None

        return choose
    common |= dict(any_row=sampling.AnyRow.of(settings), vocab_size=definition.config.vocab_size)
    return lambda logits, positions, seen: sampling.sample(
        logits, positions=positions, seen_BV=seen, **common
    )


def _last_logits(definition, params, x_BTD, ends):
    """Logits [B, V/ranks] after each row's first `ends` tokens, on one rank."""
    last = jnp.take_along_axis(x_BTD, (ends - 1)[:, None, None], axis=1)
    return nn.logits(definition, params, last)[:, 0]


def _execution(definition, **form):
    """An Execution whose launch is CHAINED or EXPLICIT: CHAINED, where no all-reduce can be hidden."""
    execution = Execution(**form)  # of words their members
    split = execution.sequence_parallel
    check(
        not split or execution.launch is not Launch.EXPLICIT,
        "launch 'explicit' halves all-reduces, and sequence parallelism has none: use 'auto'",
    )
    layout = definition.layout
    hides = execution.interleave == 2 or definition.topology.overlap is Overlap.HIDES
    hides = hides and not split and layout.ranks > 1 and not layout.emulated
    launch = resolve_launch(execution.launch, mesh=layout.mesh) if hides else Launch.CHAINED
    return dataclasses.replace(execution, launch=launch)


def compiled(
    definition: ModelDef,
    local: Callable,
    *,
    in_dims: tuple,
    out_dims: Any,
    traits: Traits | None = None,
    donate: tuple[int, ...] = (),
) -> Callable:
    """`local` of one rank as a compiled function of global arrays. Results are laid out as the
    programs here take them.

    traits: which compiler options it needs; None for a function without parameters or large
        reductions, which needs none.
    """
    layout = definition.layout
    dims = dict(layout=layout, in_dims=in_dims, out_dims=out_dims)
    whole = on_mesh(over_ranks(local, **dims), **dims)
    # Explicitly, as jax omits axes of one device from the shardings that it infers, and the next
    # call would recompile.
    how = dict(donate_argnums=donate, out_shardings=jax.tree.map(layout.sharding, out_dims))
    if traits is None:
        return apart(jax.jit(whole, **how))
    return Compiled(whole, mesh=layout.mesh, traits=traits, **how)
