"""Choosing the next token from logits that are split over the vocabulary. No rank gathers them.

Every setting is an array with an entry a row: one compiled program serves all settings, and the
rows of a batch may have different ones.

A filter (top-k, top-p, min-p) keeps the scores at or above a threshold and sets the others to -inf.
Equal scores stay or go together, so which tokens remain depends neither on their order nor on the
mesh. Together, the three keep what the highest of their thresholds keeps. `filtered` finds it in
one gather of each rank's `COUNT` largest scores. Where it lies below what was gathered (a top-k
above COUNT, or a top-p of a flat distribution), it is searched digit by digit, with 8, 10 and 1
more collectives. That is no rare case: at temperature 1 a nucleus of top-p
0.9 has often more than 128 tokens. To sort the whole vocabulary in its place, all of it would be
gathered.
"""

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ladder_jax.config import DecodeConfig
from ladder_jax.decode.request import CHOOSING, Request
from ladder_jax.nn.parameter import root_key
from ladder_jax.parallel import all_max, all_ranks, all_reduce, anywhere, rank
from ladder_jax.parallel.collectives import Axes
from ladder_jax.scopes import CHOICE

DIMS = "B"
"""The dimensions of every field of `Settings`: split as the rows are, the same on all
tensor-parallel ranks.
"""

NO_NUMBER = -1
"""The token of a row whose logits are no numbers: their largest is NaN or infinite."""

LEAST = 1e-30
"""The lowest temperature by which logits are divided, so that the quotients stay finite. Lower
temperatures draw the same tokens: already here, two different logits are further apart than the
noise reaches.
"""

OFF = {name: getattr(DecodeConfig, name) for name in CHOOSING}
DTYPES = {**dict.fromkeys(OFF, np.float32), "top_k": np.int32}

# scores that each rank sends to find a filter's threshold: 64 KiB for 16 rows over 8 ranks
COUNT = 128
BITS = 32  # of a float32
# bits of the threshold per all-reduce: 8 rounds of 15 sums a row; 1 bit needs 32 rounds, 8 bits 255
# sums
DIGIT = 4


class Choice(enum.Enum):
    """How a compiled program chooses tokens. Greedy rows should pay no collective and no branch for
    sampling.
    """

    GREEDY = "greedy"  # each row's largest logit, after the repetition penalty
    SAMPLED = "sampled"  # by each row's settings, with log-probabilities


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """How each row is sampled; every field is [B].

    temperature: float32; 0 is greedy.
    top_k: int32; only the k most probable tokens. 0 is off.
    top_p: float32; only the most probable tokens that together reach p. 1 is off.
    min_p: float32; only tokens at least p times as probable as the most probable one. 0 is off.
    repetition_penalty: float32; above 1, tokens that the row holds already become less likely. 1 is
        off.
    keys: typed PRNG keys, from which each row's noise is drawn.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    keys: Array

    @classmethod
    def of(cls, keys: Array, **settings: float | Sequence[float]) -> "Settings":
        """From Python values, for all rows or one a row; as many rows as `keys` [B] has. A setting
        that is left out is off.
        """

        def rows(name, value):
            return jnp.asarray(np.broadcast_to(np.asarray(value, DTYPES[name]), keys.shape))

        return cls(
            keys=keys, **{name: rows(name, value) for name, value in {**OFF, **settings}.items()}
        )

    @classmethod
    def like(cls, config: DecodeConfig | Request, *, rows: int) -> "Settings":
        """`config`'s settings for every row, and a key for each: row 0 of a batch has the noise of
        a prompt alone.
        """
        of_row = functools.partial(jax.random.fold_in, root_key(config.seed))
        return cls.of(
            jax.vmap(of_row)(jnp.arange(rows)), **{name: getattr(config, name) for name in OFF}
        )


class AnyRow(NamedTuple):
    """Whether any row on any rank of the mesh is sampled, uses top-k, top-p, or any filter:
    scalars, for branches.
    """

    sampled: Array
    top_k: Array
    top_p: Array
    filtered: Array

    @classmethod
    def of(cls, settings: Settings) -> "AnyRow":
        """One small collective where rows are split over the mesh, else none: call it once, before
        many `sample`s.
        """
        sampled = settings.temperature > 0
        top_k = sampled & (settings.top_k > 0)
        top_p = sampled & (settings.top_p < 1)
        filtered = top_k | top_p | sampled & (settings.min_p > 0)
        return cls(*anywhere(sampled, top_k, top_p, filtered))


def greedy(logits_BV: Array, *, settings: Settings, seen_BV: Array, axes: Axes) -> Array:
    """Each row's token of the largest logit after the penalty, [B] int32, or NO_NUMBER; equal on
    all ranks of `axes`.

    One collective. Arguments as in `sample`.
    """
    scores = _penalize(logits_BV, seen_BV, settings)
    tokens, [largest], _ = argmax_with(scores, [jnp.max(logits_BV, axis=-1)], axes=axes)
    return _checked(tokens, jnp.max(largest, axis=0))


def sample(
    logits_BV: Array,
    *,
    settings: Settings,
    any_row: AnyRow,
    positions: Array,
    seen_BV: Array,
    vocab_size: int,
    axes: Axes,
) -> tuple[Array, Array]:
    """Each row's next token, [B] int32, and its log-probability, [B] float32; equal on all ranks of
    `axes`.

    In the order of Hugging Face's logits processors: repetition penalty, temperature, top-k, top-p,
    min-p, each applied to what the one before it left. Greedy rows take the largest logit after the
    penalty. The log-probability is the log-softmax of the logits as given, before any of these.
    NO_NUMBER, and NaN, where the logits are no numbers. One collective, and those of `filtered`
    where a row uses a filter.

    logits_BV: this rank's share [B, V/ranks], float32, -inf from token `vocab_size` on.
    positions: [B]. A row's noise depends on its key, its position and the token alone, so that
        neither the mesh nor the row's neighbours change its text.
    seen_BV: this rank's share [B, V/ranks], bool: the tokens to penalise.
    """
    scores = _penalize(logits_BV, seen_BV, settings)
    sampled = settings.temperature > 0

    # Branches rather than selects: without a sampled row no noise is drawn, without a filter no
    # threshold is sought.
    def draw():
        # The padding stays -inf: divided by a large temperature it would be -inf x 0, which is NaN.
        drawn = scores / jnp.where(sampled, jnp.maximum(settings.temperature, LEAST), 1)[:, None]
        drawn = jnp.where(jnp.isneginf(scores), scores, drawn)
        filters = functools.partial(filtered, settings=settings, any_row=any_row, axes=axes)
        drawn = lax.cond(any_row.filtered, filters, lambda x: x, drawn)
        noise = _noise(
            settings.keys, positions, size=scores.shape[-1], vocab_size=vocab_size, axes=axes
        )
        return jnp.where(sampled[:, None], drawn + noise, scores)

    chosen_by = lax.cond(any_row.sampled, draw, lambda: scores)
    largest = jnp.max(logits_BV, axis=-1)
    mass = _mass(logits_BV, largest)
    own = _at(logits_BV, jnp.argmax(chosen_by, axis=-1))
    tokens, [largest, mass, own], first = argmax_with(chosen_by, [largest, mass, own], axes=axes)
    whole = jnp.max(largest, axis=0)
    chosen = _of_rank(own, first) - whole
    logprobs = chosen - jnp.log(_whole_mass(mass, largest, whole))
    return _checked(tokens, whole), logprobs


@jax.named_scope(CHOICE)
def argmax_with(
    scores_BV: Array, extra: Sequence[Array], *, axes: Axes
) -> tuple[Array, list[Array], Array]:
    """The first index of each row's largest score over all ranks, [B] int32; every rank's `extra`
    values, [ranks, B] float32 for each [B] given; and the rank of each maximum, [B].

    One all-gather of integers carries all of it: with so few bytes its time is latency.
    """
    token = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    token = token + rank(axes) * scores_BV.shape[-1]
    values = jnp.max(scores_BV, axis=-1), *extra
    sent = [token, *(lax.bitcast_convert_type(x, jnp.int32) for x in values)]
    tokens, *rest = jnp.moveaxis(all_ranks(jnp.stack(sent), axes), 1, 0)
    best, *others = (lax.bitcast_convert_type(x, jnp.float32) for x in rest)
    first = jnp.argmax(best, axis=0)  # the first of equals, which has the lower tokens
    return _of_rank(tokens, first), others, first


def _mass(scores_BV, largest_B):
    """The sum of exp(score - largest) of this rank's share, [B], which may be nothing but padding."""
    finite = jnp.where(jnp.isneginf(largest_B), 0, largest_B)
    return jnp.sum(jnp.exp(scores_BV - finite[:, None]), axis=-1)


def _whole_mass(mass_RB, largest_RB, largest_B):
    """Of all ranks' shares, [B], each from its own largest score, and the largest of these."""
    return jnp.sum(mass_RB * jnp.exp(largest_RB - largest_B[None]), axis=0)


def _at(x_BV, index_B):
    """For each row its entry at the index, [B]."""
    return jnp.take_along_axis(x_BV, index_B[:, None], axis=-1)[:, 0]


def _of_rank(x_RB, rank_B):
    """For each row the entry of one rank, [B]."""
    return jnp.take_along_axis(x_RB, rank_B[None], axis=0)[0]


def _penalize(logits_BV, seen_BV, settings):
    penalty = settings.repetition_penalty[:, None]
    penalized = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, penalized, logits_BV)


def _noise(keys, positions, *, size, vocab_size, axes):
    """Gumbel noise for this rank's share, [B, V/ranks].

    The argmax of scores plus it is a draw from their softmax (the Gumbel-max trick).
    """
    tokens = rank(axes) * size + jnp.arange(size)

    def row(key, position):
        # For the whole vocabulary, which is cheap beside the head: so the noise is the same on
        # every mesh. Low noise ends at 16, and a tail of many improbable tokens is hardly drawn.
        own = jax.random.fold_in(key, position)
        whole = jax.random.gumbel(own, (vocab_size,), jnp.float32, mode="high")
        return jnp.take(whole, jnp.clip(tokens, 0, vocab_size - 1))

    return jax.vmap(row)(keys, positions)


def _checked(tokens_B, largest_B):
    return jnp.where(jnp.isfinite(largest_B), tokens_B, NO_NUMBER)


def mark(seen_BV: Array, tokens_B: Array, *, axes: Axes) -> Array:
    """This rank's share of `seen`, [B, V/ranks], with each row's next token [B] added."""
    size = seen_BV.shape[-1]
    chosen = tokens_B[:, None]
    own = rank(axes) * size + jnp.arange(size)
    return seen_BV | (chosen == own[None])


@jax.named_scope(CHOICE)
def filtered(
    scores_BV: Array, *, settings: Settings, any_row: AnyRow, axes: Axes, count: int = COUNT
) -> Array:
    """This rank's share of the scores, [B, V/ranks] float32, with -inf for every token that a
    filter removes.

    Top-k, top-p and min-p, each of what the one before it left. One collective, and one more where
    rows are split over the mesh; those of the digit search where any row needs it.
    """
    threshold, is_below = _threshold(*_gather(scores_BV, axes=axes, count=count), settings)
    keep = lambda x: jnp.where(x >= threshold[:, None], x, -jnp.inf)

    def search(x):
        # Its sums round otherwise: a row's nucleus must not depend on whether another row needs it.
        found = _search(x, settings=settings, any_row=any_row, axes=axes)
        return jnp.where(is_below[:, None], found, keep(x))

    (any_below,) = anywhere(is_below & (settings.temperature > 0))
    return lax.cond(any_below, search, keep, scores_BV)


def _search(scores_BV, *, settings, any_row, axes):
    """As `filtered`, digit by digit. Masses are float32 sums: a token whose cumulative probability
    is within rounding of top-p may be kept or not.
    """

    def top_k(x_BV):
        k_B = settings.top_k
        needed = jnp.where(k_B > 0, k_B, jnp.iinfo(jnp.int32).max)
        return _keep_until(x_BV, jnp.ones_like(x_BV, jnp.int32), needed, axes=axes)

    def top_p(x_BV):
        p_B = settings.top_p
        mass = jnp.exp(x_BV - _largest(x_BV, axes=axes)[:, None])
        total = all_reduce(jnp.sum(mass, axis=-1), axes)
        # Never 0: then not even the largest score, of mass 1, would be kept.
        needed = jnp.maximum(p_B * total, jnp.finfo(jnp.float32).tiny)
        return _keep_until(x_BV, mass, jnp.where(p_B < 1, needed, jnp.inf), axes=axes)

    kept = lax.cond(any_row.top_k, top_k, lambda x: x, scores_BV)
    kept = lax.cond(any_row.top_p, top_p, lambda x: x, kept)
    threshold = _largest(kept, axes=axes) + jnp.minimum(jnp.log(settings.min_p), 0)
    return jnp.where(kept >= threshold[:, None], kept, -jnp.inf)


def _gather(scores_BV, *, axes, count):
    """The largest scores of all ranks, the same on each.

    values: [B, C], descending. floor: [B]; every score above it is in `values`; -inf where `values`
        has all scores.
    mass: [B], the sum of exp(score - largest) over the whole vocabulary.
    """
    size = scores_BV.shape[-1]
    # What follows takes slices of two widths of these. Without the barrier XLA moves them into its
    # top-k, which then sorts the vocabulary, where its kernel would not.
    own = lax.optimization_barrier(lax.top_k(scores_BV, min(count, size))[0])
    mass = _mass(scores_BV, own[:, 0])
    sent = all_ranks(jnp.concatenate([own, mass[:, None]], axis=-1), axes)  # [ranks, B, count + 1]
    lists = sent[..., :-1]
    masses = sent[..., -1]
    largest = jnp.max(lists[..., 0], axis=0)
    whole = jnp.full_like(largest, -jnp.inf)
    values = jnp.sort(
        jnp.moveaxis(lists, 0, 1).reshape(len(scores_BV), -1), axis=-1, descending=True
    )
    floor = jnp.max(lists[..., -1], axis=0) if count < size else whole
    return values, floor, _whole_mass(masses, lists[..., 0], largest)


def _threshold(values, floor, whole_mass, settings):
    """The lowest score that each row keeps, [B], and whether it lies below the gathered scores, [B]
    bool.

    The second is False for a row of NaN, in which there is nothing to search.
    """
    largest = values[:, 0]
    count = values.shape[-1]

    def at(index):
        return _at(values, jnp.clip(index, 0, count - 1))

    has_k = settings.top_k > 0
    exceeds = has_k & (settings.top_k > count)  # keeps all scores, if these are all
    kth = jnp.where(has_k & ~exceeds, at(settings.top_k - 1), -jnp.inf)
    k_below = (kth < floor) & has_k

    # The mass that top-k leaves. At the floor it is not known: equal scores may be among those not
    # gathered.
    mass = jnp.where(values >= kth[:, None], jnp.exp(values - largest[:, None]), 0)
    total = jnp.where(has_k & ~exceeds, jnp.sum(mass, axis=-1), whole_mass)
    # Never 0: then not even the largest score, of mass 1, would be kept.
    needed = jnp.maximum(settings.top_p * total, jnp.finfo(jnp.float32).tiny)
    enough = jnp.cumsum(mass, axis=-1) >= needed[:, None]
    has_p = settings.top_p < 1
    reached = jnp.any(enough, axis=-1)
    # Rounding in the last places of the sums can only keep more.
    lowest = jnp.where(reached, at(jnp.argmax(enough, axis=-1)), kth)
    nucleus = jnp.where(has_p, lowest, -jnp.inf)
    unsure_total = has_k & (kth <= floor) & ~jnp.isneginf(floor)
    p_below = has_p & ((nucleus < floor) | unsure_total)

    probable = largest + jnp.minimum(jnp.log(settings.min_p), 0)
    return jnp.maximum(jnp.maximum(kth, nucleus), probable), k_below | p_below


def _largest(scores_BV, *, axes):
    return all_max(jnp.max(scores_BV, axis=-1), axes)


def _keep_until(scores_BV, weights_BV, needed_B, *, axes):
    """The largest scores of each row, until their weights sum to `needed`; all of them where they
    never do.

    The threshold is the largest score at or above which there is enough weight. It is searched as
    an unsigned integer, digit by digit from the top, each time the largest digit that leaves
    enough, with an all-reduce of [B, 15] a digit. Digit 0 always leaves enough, so rounding in the
    last places of a sum can only keep more.
    """
    order_BV = _ordered(scores_BV)
    digits = jnp.arange(1, 2**DIGIT, dtype=jnp.uint32)

    def refine(turn, lowest_B):
        shift = (BITS - DIGIT * (turn + 1)).astype(jnp.uint32)
        candidates = lowest_B[:, None] | (digits << shift)[None]
        above = order_BV[:, None] >= candidates[:, :, None]  # [B, 15, V/ranks], fused into its sum
        weight = all_reduce(jnp.sum(jnp.where(above, weights_BV[:, None], 0), axis=-1), axes)
        # A larger candidate never has more weight, so the number of candidates with enough is the
        # largest such digit.
        digit = jnp.sum(weight >= needed_B[:, None], axis=-1, dtype=jnp.uint32)
        return lowest_B | (digit << shift)

    lowest_B = lax.fori_loop(0, BITS // DIGIT, refine, jnp.zeros_like(needed_B, jnp.uint32))
    return jnp.where(order_BV >= lowest_B[:, None], scores_BV, -jnp.inf)


def _ordered(x):
    """Float32 values as uint32 in the same order.

    Positive floats are ordered as their bits are, negative ones the other way round and below them.
    """
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)  # -0.0 equals 0.0
    top = jnp.uint32(1 << (BITS - 1))
    return jnp.where(bits < top, bits | top, ~bits)
