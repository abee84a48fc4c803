"""Top-k, top-p and min-p over a vocabulary that is split over ranks. No rank gathers or sorts the vocabulary.

A filter keeps the scores at or above a threshold and sets the others to -inf. Equal scores stay or go together, so
which tokens remain depends neither on their order nor on the mesh. Together, the three filters keep what the highest of
their thresholds keeps.

`filtered` finds that threshold in one gather of each rank's `COUNT` largest scores. Where it lies below what was
gathered (a top-k above COUNT, or a top-p of a flat distribution), `top_k`, `top_p` and `min_p` search it digit by
digit, with 8, 10 and 1 more collectives.

The search is no rare case: at temperature 1 a nucleus of top-p 0.9 has often more than 128 tokens. To sort the whole
vocabulary in its place, all of it would be gathered.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.parallel import all_max, all_ranks, all_reduce, anywhere
from ladder_jax.parallel.collectives import CHOICE, Axes

COUNT = 128  # scores that each rank sends: 64 KiB for 16 rows over 8 ranks
BITS = 32  # of a float32
DIGIT = 4  # bits of the threshold per all-reduce: 8 rounds of 15 sums a row; 1 bit needs 32 rounds, 8 bits 255 sums


@dataclasses.dataclass(frozen=True)
class Filters:
    """Each row's settings, [B], as in `sampling.Settings`. Rows of temperature 0 are not filtered.

    any_top_k, any_top_p: scalars, the same on all ranks of the mesh: whether any sampled row sets it.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    any_top_k: jax.Array
    any_top_p: jax.Array


@dataclasses.dataclass(frozen=True)
class _Largest:
    """The largest scores of all ranks, the same on each.

    values: [B, C], descending. floor: [B]; every score above it is in `values`; -inf where `values` has all scores.
    mass: [B], the sum of exp(score - largest) over the whole vocabulary.
    """

    values: jax.Array
    floor: jax.Array
    mass: jax.Array


@jax.named_scope(CHOICE)
def filtered(scores_BV: jax.Array, *, filters: Filters, axes: Axes, count: int = COUNT) -> jax.Array:
    """This rank's share of the scores, [B, V/ranks] float32, with -inf for every token that a filter removes.

    The same as `top_k`, `top_p` and `min_p` one after another. One collective, and one more where rows are split over
    the mesh; those of the digit search where any row needs it.
    """
    largest = _gather(scores_BV, axes=axes, count=count)
    threshold, is_below = _threshold(largest, filters)
    keep = lambda x: jnp.where(x >= threshold[:, None], x, -jnp.inf)
    search = lambda x: _search(x, filters=filters, axes=axes)
    (any_below,) = anywhere(is_below & (filters.temperature > 0))
    return lax.cond(any_below, search, keep, scores_BV)


def _search(scores_BV, *, filters, axes):
    kept = scores_BV
    kept = lax.cond(filters.any_top_k, lambda x: top_k(x, filters.top_k, axes=axes), lambda x: x, kept)
    kept = lax.cond(filters.any_top_p, lambda x: top_p(x, filters.top_p, axes=axes), lambda x: x, kept)
    return min_p(kept, filters.min_p, axes=axes)


def _gather(scores_BV, *, axes, count):
    size = scores_BV.shape[-1]
    # What follows takes slices of two widths of these. Without the barrier XLA moves them into its top-k, which then
    # sorts the vocabulary, where its kernel would not.
    own = lax.optimization_barrier(lax.top_k(scores_BV, min(count, size))[0])
    finite = jnp.where(jnp.isneginf(own[:, 0]), 0, own[:, 0])  # a rank may hold nothing but padding
    mass = jnp.sum(jnp.exp(scores_BV - finite[:, None]), axis=-1)
    sent = all_ranks(jnp.concatenate([own, mass[:, None]], axis=-1), axes)  # [ranks, B, count + 1]
    lists, masses = sent[..., :-1], sent[..., -1]
    largest = jnp.max(lists[..., 0], axis=0)
    whole = jnp.full_like(largest, -jnp.inf)
    return _Largest(
        values=jnp.sort(jnp.moveaxis(lists, 0, 1).reshape(len(scores_BV), -1), axis=-1, descending=True),
        floor=jnp.max(lists[..., -1], axis=0) if count < size else whole,
        mass=jnp.sum(masses * jnp.exp(lists[..., 0] - largest[None]), axis=0),
    )


def _threshold(gathered, filters):
    """The lowest score that each row keeps, [B], and whether it lies below the gathered scores, [B] bool.

    The second is False for a row of NaN, in which there is nothing to search.
    """
    values, floor, largest = gathered.values, gathered.floor, gathered.values[:, 0]
    count = values.shape[-1]
    at = lambda index: jnp.take_along_axis(values, jnp.clip(index, 0, count - 1)[:, None], axis=-1)[:, 0]

    has_k = filters.top_k > 0
    exceeds = has_k & (filters.top_k > count)  # keeps all scores, if these are all
    kth = jnp.where(has_k & ~exceeds, at(filters.top_k - 1), -jnp.inf)
    k_below = (kth < floor) & has_k

    # The mass that top-k leaves. At the floor it is not known: equal scores may be among those not gathered.
    mass = jnp.where(values >= kth[:, None], jnp.exp(values - largest[:, None]), 0)
    total = jnp.where(has_k & ~exceeds, jnp.sum(mass, axis=-1), gathered.mass)
    # Never 0: then not even the largest score, of mass 1, would be kept.
    needed = jnp.maximum(filters.top_p * total, jnp.finfo(jnp.float32).tiny)
    enough = jnp.cumsum(mass, axis=-1) >= needed[:, None]
    has_p, reached = filters.top_p < 1, jnp.any(enough, axis=-1)
    # Rounding in the last places of the sums can only keep more.
    nucleus = jnp.where(has_p, jnp.where(reached, at(jnp.argmax(enough, axis=-1)), kth), -jnp.inf)
    unsure_total = has_k & (kth <= floor) & ~jnp.isneginf(floor)
    p_below = has_p & ((nucleus < floor) | unsure_total)

    probable = largest + jnp.minimum(jnp.log(filters.min_p), 0)
    return jnp.maximum(jnp.maximum(kth, nucleus), probable), k_below | p_below


def top_k(scores_BV: jax.Array, k_B: jax.Array, *, axes: Axes) -> jax.Array:
    """This rank's share of the scores, [B, V/ranks]: each row's k largest and all that equal the k-th, the others -inf.

    k: [B] int32; 0 keeps all.
    """
    needed = jnp.where(k_B > 0, k_B, jnp.iinfo(jnp.int32).max)
    return _keep_until(scores_BV, jnp.ones_like(scores_BV, jnp.int32), needed, axes=axes)


def top_p(scores_BV: jax.Array, p_B: jax.Array, *, axes: Axes) -> jax.Array:
    """As `top_k`, with each row's smallest set of largest scores whose softmax reaches p, and at least the largest.

    p: [B] float32; 1 keeps all. The softmax is over the scores given; one of -inf has no mass. Masses are float32 sums:
    a token whose cumulative probability is within rounding of p may be kept or not.
    """
    mass = jnp.exp(scores_BV - _largest(scores_BV, axes=axes)[:, None])
    total = all_reduce(jnp.sum(mass, axis=-1), axes)
    # Never 0: then not even the largest score, of mass 1, would be kept.
    needed = jnp.maximum(p_B * total, jnp.finfo(jnp.float32).tiny)
    return _keep_until(scores_BV, mass, jnp.where(p_B < 1, needed, jnp.inf), axes=axes)


def min_p(scores_BV: jax.Array, p_B: jax.Array, *, axes: Axes) -> jax.Array:
    """As `top_k`, with each row's tokens that are at least p times as probable as its most probable one.

    p: [B] float32; 0 keeps all.
    """
    threshold = _largest(scores_BV, axes=axes) + jnp.minimum(jnp.log(p_B), 0)
    return jnp.where(scores_BV >= threshold[:, None], scores_BV, -jnp.inf)


def _largest(scores_BV, *, axes):
    return all_max(jnp.max(scores_BV, axis=-1), axes)


def _keep_until(scores_BV, weights_BV, needed_B, *, axes):
    """The largest scores of each row, until their weights sum to `needed`; all of them where they never do.

    The threshold is the largest score at or above which there is enough weight. It is searched as an unsigned integer,
    digit by digit from the top, each time the largest digit that leaves enough, with an all-reduce of [B, 15] a digit.
    Digit 0 always leaves enough, so rounding in the last places of a sum can only keep more.
    """
    order_BV = _ordered(scores_BV)
    digits = jnp.arange(1, 2**DIGIT, dtype=jnp.uint32)

    def refine(turn, lowest_B):
        shift = (BITS - DIGIT * (turn + 1)).astype(jnp.uint32)
        candidates = lowest_B[:, None] | (digits << shift)[None]
        above = order_BV[:, None] >= candidates[:, :, None]  # [B, 15, V/ranks], fused into its sum
        weight = all_reduce(jnp.sum(jnp.where(above, weights_BV[:, None], 0), axis=-1), axes)
        # A larger candidate never has more weight, so the number of candidates with enough is the largest such digit.
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
