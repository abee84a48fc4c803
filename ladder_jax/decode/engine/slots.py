"""The slots on the devices: one row each of caches, tokens and settings, all of fixed shapes.

A prompt is read as a batch of one row, padded to one of a few lengths, and the row is then written
into its slot in place. Decoding computes all slots at once, unused ones too, whose tokens are
ignored.
"""

import dataclasses
import functools
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ladder_jax.config import Launch, Loop, Quantize
from ladder_jax.decode import sampling, steps
from ladder_jax.decode.request import Request
from ladder_jax.decode.sampling import Choice, Settings
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.parameter import root_key
from ladder_jax.parallel import cache_programs


class State(NamedTuple):
    """B rows: all slots, or one row, of a prompt just read. In the order of `decode_many`'s
    arguments.

    caches: a Cache for each layer, [B, S, K, H], or stacked for a scan.
    seen: [B, V] bool, the tokens before `tokens`.
    tokens: [B] int32, the last of each row; not in the cache yet.
    lengths: [B] int32, filled positions of the cache.
    settings: [B] each.
    """

    caches: Any
    seen: Array
    tokens: Array
    lengths: Array
    settings: Settings


class Slots:
    """What the devices hold and compute. Which slots are in use is the caller's to track.

    params: `weights.prepare`d.
    capacity: the most tokens of a request, prompt and new ones together.
    chunk: tokens that a call of `decode` makes. prefill_chunk: the most tokens of a prompt that are
        read at once.
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
        interleave: int,
        loop: Loop,
        launch: Launch,
        quantize: Quantize,
    ):
        self._definition = definition
        self._params = params
        self._read = dict(chunk=prefill_chunk, interleave=interleave)
        self._form = dict(loop=loop, launch=launch, quantize=quantize)
        self._positions = steps.positions_for(capacity, chunk=chunk)
        self.buckets = buckets(longest=capacity - 1, positions=self._positions)
        programs = functools.partial(steps.decode_many, definition, count=chunk, **self._form)
        self._decode = {choice: programs(choice=choice) for choice in Choice}
        self._state = _empty(definition, slots=slots, positions=self._positions, loop=loop)()

    def insert(self, slot: int, request: Request) -> Generator[None, None, tuple[Array, Array]]:
        """Reads the prompt into `slot`, a chunk of it with each `next`; the slot is unchanged until
        the last.

        Returns the first new token and its log-probability, [1] each, which the devices may still
        be computing.
        """
        length = len(request.prompt)
        bucket = steps.padded_length(length, positions=self._positions)
        padded = np.zeros((1, bucket), np.int32)
        padded[0, :length] = request.prompt
        lengths = np.array([length], np.int32)
        settings = Settings.like(request, rows=1)
        # The row's caches are only as long as the bucket.
        logits, caches = yield from steps.prefill_chunks(
            self._definition,
            self._params,
            padded,
            lengths,
            capacity=bucket,
            **self._read,
            **self._form,
        )
        seen = steps.seen_in(self._definition)(padded, lengths)
        token, logprob = steps.sample_first(self._definition)(logits, settings, lengths, seen)
        row = State(caches, seen, token, lengths, settings)
        insert = _insert(self._definition, loop=self._form["loop"])
        self._state = insert(self._state, row, np.int32(slot))
        return token, logprob

    def decode(self, choice: Choice) -> tuple[Array, Array | None]:
        """The next tokens and log-probabilities of all slots, [slots, chunk] each. `advance` must
        follow.

        With GREEDY there are no log-probabilities, and no slot in use may be sampled.
        """
        new, logprobs, caches, seen = self._decode[choice](self._params, *self._state)
        self._state = self._state._replace(caches=caches, seen=seen)
        return new, logprobs

    def advance(self, new: Array, *, active: np.ndarray) -> None:
        """Moves the slots in use, `active` [slots] bool, past `new`, which `decode` gave; the
        others to position 0.
        """
        state = self._state
        tokens, lengths, temperature = _advance(self._definition)(
            new, state.lengths, state.settings.temperature, active
        )
        settings = dataclasses.replace(state.settings, temperature=temperature)
        self._state = state._replace(tokens=tokens, lengths=lengths, settings=settings)


def buckets(*, longest: int, positions: int) -> tuple[int, ...]:
    """All padded lengths of prompts of up to `longest` tokens, in order."""
    lengths = [steps.padded_length(1, positions=positions)]
    while lengths[-1] < longest:
        lengths.append(steps.padded_length(lengths[-1] + 1, positions=positions))
    return tuple(lengths)


def _dims(definition, *, loop):
    return State(steps.cache_dims(definition, loop=loop), "BV", "B", "B", sampling.DIMS)


@cache_programs
def _empty(definition, *, slots, positions, loop):
    """A compiled () -> unused slots."""
    _, *shapes, _ = steps.abstract(definition, rows=slots, positions=positions, loop=loop)

    def make():
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        return State(*zeros, Settings.of(jnp.broadcast_to(root_key(0), (slots,))))

    return jax.jit(
        make, out_shardings=jax.tree.map(definition.layout.sharding, _dims(definition, loop=loop))
    )


@cache_programs
def _insert(definition, *, loop):
    """A compiled (state, one row's state, slot) -> state with that row in the slot. The first is
    donated.

    What the row has no value for becomes zero: attention weights masked positions with 0, and 0 x
    NaN, of the request before, is NaN.
    """
    dims = _dims(definition, loop=loop)

    def local(state, row, slot):
        def put(letters, old, new):
            axis = letters.index("B")

            def one(o, n):
                zeros = jnp.zeros_like(lax.slice_in_dim(o, 0, 1, axis=axis))
                o = lax.dynamic_update_slice_in_dim(o, zeros, slot, axis)
                return lax.dynamic_update_slice_in_dim(o, n, slot, axis)

            return jax.tree.map(one, old, new)

        return jax.tree.map(put, dims, state, row)

    return steps.compiled(definition, local, in_dims=(dims, dims, ""), out_dims=dims, donate=(0,))


@cache_programs
def _advance(definition):
    """A compiled (new tokens [B, count], lengths, temperature, active: [B] each) -> (tokens,
    lengths, temperature).
    """

    def local(new, lengths, temperature, active):
        # An idle slot goes back to position 0, to stay within the cache, and becomes greedy, to
        # draw no noise.
        lengths = jnp.where(active, lengths + new.shape[1], 0)
        return new[:, -1], lengths, jnp.where(active, temperature, 0)

    return steps.compiled(
        definition, local, in_dims=("BT", "B", "B", "B"), out_dims=("B", "B", "B")
    )
