"""The slots on the devices: one row each of caches, tokens and settings, all of fixed shapes.

A prompt is read as a batch of one, padded to one of a few lengths, and its row put into its slot in
place. Decoding moves all slots at once, those that nobody uses too: what they compute is ignored.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax import nn
from ladder_jax.config import Launch, Loop, Quantize
from ladder_jax.decode import cache, sampling, steps
from ladder_jax.decode.chunks import blocks
from ladder_jax.decode.engine.request import Request
from ladder_jax.decode.sampling import Choice, Settings
from ladder_jax.nn import ModelDef, Params
from ladder_jax.parallel import on_mesh

SHORTEST = 32  # the shortest padded prompt, in tokens
UNIT = 32  # a cache's length is a multiple


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """B rows: a slot each, or the one of a prompt just read.

    caches: a Cache for each layer, [B, S, K, H], or stacked for a scan.
    seen: [B, V] bool, the tokens before `tokens`.
    tokens: [B] int32, the last of each row; not in the cache yet.
    lengths: [B] int32, positions filled.
    settings: [B] each.
    """

    caches: Any
    seen: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    settings: Settings


class Slots:
    """What the devices hold and compute; the caller knows which slots are in use.

    params: `weights.prepare`d.
    capacity: positions a request may fill, prompt and new tokens together.
    chunk: tokens a call of `decode`; prefill_chunk: of a prompt that are read at once.
    """

    def __init__(
        self,
        definition: ModelDef,
        params: Params,
        *,
        slots: int,
        capacity: int,
        chunk: int,
        prefill_chunk: int,
        loop: Loop,
        launch: Launch,
        quantize: Quantize,
    ):
        self._definition, self._params, self._prefill_chunk = definition, params, prefill_chunk
        self._form = dict(loop=loop, quantize=quantize)
        # A request may end anywhere in a chunk, and its slot goes on to the chunk's end. With room for that,
        # nothing is ever written out of range, where jax would drop it silently.
        positions = -(-(capacity + chunk) // UNIT) * UNIT
        self.buckets = buckets(longest=capacity - 1, positions=positions)
        programs = functools.partial(steps.decode_many, definition, count=chunk, launch=launch, **self._form)
        self._decode = {choice: programs(choice=choice) for choice in Choice}
        self._state = _empty(definition, slots=slots, positions=positions, loop=loop)()

    def insert(self, slot: int, request: Request) -> Generator[None, None, tuple[jax.Array, jax.Array]]:
        """Reads the prompt into `slot`, a block for each `next`; the slot is untouched until the last.

        Returns its first new token and log-probability, [1] each, still on their way.
        """
        length = len(request.prompt)
        bucket = next(bucket for bucket in self.buckets if bucket >= length)
        padded = np.zeros((1, bucket), np.int32)
        padded[0, :length] = request.prompt
        lengths, settings = np.array([length], np.int32), _settings(request)
        # The row's caches are only as long as the bucket: what lies beyond in the slot is never read.
        sizes = dict(capacity=bucket, chunk=self._prefill_chunk)
        logits, caches = yield from blocks(self._definition, self._params, padded, lengths, **sizes, **self._form)
        seen = steps.seen_in(self._definition)(padded, lengths)
        token, logprob = steps.sample_first(self._definition)(logits, settings, lengths, seen)
        row = State(caches, seen, token, lengths, settings)
        self._state = _insert(self._definition, loop=self._form["loop"])(self._state, row, np.int32(slot))
        return token, logprob

    def decode(self, choice: Choice) -> tuple[jax.Array, jax.Array | None]:
        """The next tokens and log-probabilities of all slots, [slots, chunk] each. `advance` must follow.

        GREEDY is for when no slot in use is drawn or asks for log-probabilities; there are none, then.
        """
        state = self._state
        new, logprobs, caches, seen = self._decode[choice](
            self._params, state.caches, state.seen, state.tokens, state.lengths, state.settings
        )
        self._state = dataclasses.replace(state, caches=caches, seen=seen)
        return new, logprobs

    def clear(self, slot: int) -> None:
        """Empties the caches of a slot that holds what is no number: attention gives what it must not see the weight
        0, and 0 x NaN is NaN for whoever has the slot next."""
        caches = _clear(self._definition, loop=self._form["loop"])(self._state.caches, np.int32(slot))
        self._state = dataclasses.replace(self._state, caches=caches)

    def advance(self, new: jax.Array, *, active: np.ndarray) -> None:
        """After `decode` gave `new`: the slots in use, `active` [slots] bool, go on; the others stand at 0."""
        state = self._state
        tokens, lengths, temperature = _advance(self._definition)(
            new, state.lengths, state.settings.temperature, active
        )
        settings = dataclasses.replace(state.settings, temperature=temperature)
        self._state = dataclasses.replace(state, tokens=tokens, lengths=lengths, settings=settings)


def buckets(*, longest: int, positions: int) -> tuple[int, ...]:
    """Padded lengths for prompts of up to `longest` tokens: powers of two, none above `positions`."""
    found = [SHORTEST]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return (*found[:-1], min(found[-1], positions))


def _settings(request: Request) -> Settings:
    """[1] each. The noise is that of the seed, and of a batch's first row: the same as for the request alone."""
    return Settings.of(
        jax.random.fold_in(jax.random.key(request.seed), 0)[None],
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
    )


def _dims(definition: ModelDef, *, loop: Loop) -> State:
    return State(cache.dims(definition, loop=loop), "BV", "B", "B", sampling.DIMS)


@functools.cache
def _empty(definition: ModelDef, *, slots: int, positions: int, loop: Loop) -> Callable[[], State]:
    """A compiled () -> slots that nobody uses."""
    layout = definition.layout
    caches = cache.abstract(definition, rows=slots, capacity=positions, loop=loop)
    vocabulary = nn.padded_vocabulary(definition.config.vocab_size, ranks=layout.ranks)

    def make():
        keys = jnp.broadcast_to(jax.random.key(0), (slots,))
        integers = jnp.zeros(slots, jnp.int32)
        return State(
            caches=jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), caches),
            seen=jnp.zeros((slots, vocabulary), bool),
            tokens=integers,
            lengths=integers,
            settings=Settings.of(keys),
        )

    return jax.jit(make, out_shardings=jax.tree.map(layout.sharding, _dims(definition, loop=loop)))


@functools.cache
def _insert(definition: ModelDef, *, loop: Loop) -> Callable:
    """A compiled (state, one row's state, slot) -> state with that row there. The first is consumed."""
    dims = _dims(definition, loop=loop)

    def local(state, row, slot):
        def put(letters, old, new):
            axis = letters.index("B")
            return jax.tree.map(lambda o, n: lax.dynamic_update_slice_in_dim(o, n, slot, axis), old, new)

        return jax.tree.map(put, dims, state, row)

    return _jit(definition, local, in_dims=(dims, dims, ""), out_dims=dims, donate=(0,))


@functools.cache
def _clear(definition: ModelDef, *, loop: Loop) -> Callable:
    """A compiled (caches, slot) -> caches with zeros in that row. The first are consumed."""
    dims = cache.dims(definition, loop=loop)

    def local(caches, slot):
        def zero(letters, old):
            axis = letters.index("B")
            row = jnp.zeros_like(lax.dynamic_slice_in_dim(old, slot, 1, axis))
            return lax.dynamic_update_slice_in_dim(old, row, slot, axis)

        return jax.tree.map(zero, dims, caches)

    return _jit(definition, local, in_dims=(dims, ""), out_dims=dims, donate=(0,))


@functools.cache
def _advance(definition: ModelDef) -> Callable:
    """A compiled (new tokens [B, count], lengths, temperature, active: [B] each) -> (tokens, lengths, temperature)."""

    def local(new, lengths, temperature, active):
        # An idle slot starts again at 0, so that it stays within the cache; greedy, so that it draws no noise.
        return new[:, -1], jnp.where(active, lengths + new.shape[1], 0), jnp.where(active, temperature, 0)

    return _jit(definition, local, in_dims=("BT", "B", "B", "B"), out_dims=("B", "B", "B"))


def _jit(definition: ModelDef, local: Callable, *, in_dims: Any, out_dims: Any, donate: tuple = ()) -> Callable:
    """What it gives is laid out as `steps` gives it and takes it."""
    layout = definition.layout
    meshed = on_mesh(local, layout=layout, in_dims=in_dims, out_dims=out_dims)
    out_shardings = jax.tree.map(layout.sharding, out_dims)
    return jax.jit(meshed, donate_argnums=donate, out_shardings=out_shardings)
