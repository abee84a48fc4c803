"""Top-k, top-p and min-p over a vocabulary that is split over ranks. No rank gathers or sorts it.

Each takes this rank's share of the scores, [B, V/ranks] float32, and a setting a row, [B], and gives the
scores back with what is cut at -inf. A cut is a value: equal scores stay or go together, so which tokens
remain depends neither on their order nor on the mesh.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.parallel import all_max, all_reduce

BITS = 32  # of a float32
DIGIT = 4  # bits found by one all-reduce: 8 rounds of 15 sums a row, where 1 bit took 32 rounds and 8 bits 255 sums


def top_k(scores_BV: jax.Array, k_B: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """The k largest of each row, and all that equal the last of them. k: int32, 0 keeps all."""
    wanted = jnp.where(k_B > 0, k_B, jnp.iinfo(jnp.int32).max)
    return _keep_until(scores_BV, jnp.ones_like(scores_BV, jnp.int32), wanted, axes=axes)


def top_p(scores_BV: jax.Array, p_B: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Each row's smallest set of largest scores whose softmax reaches p, at least the largest. p: float32, 1 keeps all.

    Of the scores given: what is at -inf has no mass. Masses are sums in float32, so that a token whose
    place among the others is within rounding of p may be on either side.
    """
    mass = jnp.exp(scores_BV - _largest(scores_BV, axes=axes)[:, None])
    total = all_reduce(jnp.sum(mass, axis=-1), axes)
    # The largest has mass 1 of a total of 1 or more: any positive mass, however small p is, wants it.
    wanted = jnp.maximum(p_B * total, jnp.finfo(jnp.float32).tiny)
    return _keep_until(scores_BV, mass, jnp.where(p_B < 1, wanted, jnp.inf), axes=axes)


def min_p(scores_BV: jax.Array, p_B: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """What is at least p times as probable as the row's most probable token. p: float32, 0 keeps all."""
    lowest = _largest(scores_BV, axes=axes) + jnp.minimum(jnp.log(p_B), 0)
    return jnp.where(scores_BV >= lowest[:, None], scores_BV, -jnp.inf)


def _largest(scores_BV: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    return all_max(jnp.max(scores_BV, axis=-1), axes)


def _keep_until(
    scores_BV: jax.Array, weights_BV: jax.Array, wanted_B: jax.Array, *, axes: tuple[str, ...]
) -> jax.Array:
    """The largest scores of each row, until their weights sum to `wanted`; all of them where they never do.

    The lowest score kept is the largest one at or above which there is enough weight. It is found as an
    integer, digit by digit from the top, each the largest that leaves enough: an all-reduce of [B, 15]
    a digit. Zero always does, so rounding in the last places of a sum can only keep more.
    """
    order_BV = _ordered(scores_BV)
    digits = jnp.arange(1, 2**DIGIT, dtype=jnp.uint32)

    def refine(turn, lowest_B):
        shift = (BITS - DIGIT * (turn + 1)).astype(jnp.uint32)
        candidates = lowest_B[:, None] | (digits << shift)[None]
        above = order_BV[:, None] >= candidates[:, :, None]  # [B, 15, V/ranks], fused into its sum
        weight = all_reduce(jnp.sum(jnp.where(above, weights_BV[:, None], 0), axis=-1), axes)
        # A larger candidate never has more weight: how many have enough is the largest digit that has.
        digit = jnp.sum(weight >= wanted_B[:, None], axis=-1, dtype=jnp.uint32)
        return lowest_B | (digit << shift)

    lowest_B = lax.fori_loop(0, BITS // DIGIT, refine, jnp.zeros_like(wanted_B, jnp.uint32))
    return jnp.where(order_BV >= lowest_B[:, None], scores_BV, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Float32 values as uint32 in the same order.

    Positive floats are ordered as their bits are, negative ones the other way round and below them.
    """
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0, x), jnp.uint32)  # -0.0 equals 0.0
    top = jnp.uint32(1 << (BITS - 1))
    return jnp.where(bits < top, bits | top, ~bits)
