"""Cross-entropy over a vocabulary that stays split, a few positions at a time.

Each chunk's gradient is computed in the forward pass; backward multiplies it by the loss's cotangent. No logits are
stored or recomputed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.parallel import all_max, all_reduce, pvary, rank, varying
from ladder_jax.parallel.collectives import EMULATED, LOSS

# (x, table, of_positions) -> (sums, dx or None, dtable or None) of some positions
Chunk = Callable[[jax.Array, jax.Array, Any], tuple[Any, jax.Array | None, jax.Array | None]]


class Terms(NamedTuple):
    """Hashable, as what a custom gradient must know beside its arrays."""

    vocab_size: int
    axes: tuple[str, ...]
    z_loss: float
    chunk: int


@jax.named_scope(LOSS)
def cross_entropy_sum(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    vocab_size: int,
    axes: tuple[str, ...],
    z_loss: float = 0.0,
    chunk: int = 2048,
) -> jax.Array:
    """The sum of weight x (negative log-likelihood + z_loss x log(Z)^2), in nats, equal on all ranks of `axes`.

    x_BTD: the normed stream, equal on all ranks of `axes` but for its type. table_VD: this rank's V/ranks rows of the
    output table; the vocabulary's padding counts for nothing. weights_BT: float32.
    z_loss: keeps the softmax's denominator Z near 1 (PaLM, arXiv 2204.02311, section 5).
    chunk: how many positions, B x T, have their float32 logits in memory at once.
    """
    terms = Terms(vocab_size, axes, z_loss, chunk)
    if EMULATED in axes:  # a `vmap`, which cannot tell a custom gradient that the loss is shared by all ranks
        return _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, terms, gradient=False)[0]
    x_BTD = pvary(x_BTD, axes)
    table_VD = pvary(table_VD, varying(x_BTD))
    return _summed(x_BTD, table_VD, targets_BT, weights_BT, terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(x_BTD, table_VD, targets_BT, weights_BT, terms):
    return _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, terms, gradient=False)[0]


def _forward(x_BTD, table_VD, targets_BT, weights_BT, terms):
    total, *gradients = _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, terms, gradient=True)
    return total, gradients


def _backward(_, gradients, factor):
    return *((g * factor).astype(g.dtype) for g in gradients), None, None


_summed.defvjp(_forward, _backward)


def _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, terms: Terms, *, gradient: bool):
    """(the sum, its gradients of x and the table, if asked for)."""
    chunk = lambda x, table, others: _chunk(x, table, *others, terms, gradient=gradient)
    settings = dict(size=terms.chunk, axes=terms.axes, gradient=gradient)
    return over_chunks(chunk, x_BTD, table_VD, (targets_BT, weights_BT), **settings)


def _chunk(x_BTD, table_VD, targets_BT, weights_BT, terms: Terms, *, gradient: bool):
    """(the sum, gradients of x in its dtype and of the table in float32, both this rank's own) of a few positions."""
    size, axes = table_VD.shape[0], terms.axes
    first = rank(axes) * size
    logits = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
    real = (first + jnp.arange(size) < terms.vocab_size)[None, None, :]
    logits = jnp.where(real, logits, -jnp.inf)
    largest = all_max(lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
    powers = jnp.exp(logits - largest[:, :, None])
    total = all_reduce(jnp.sum(powers, axis=-1), axes)
    local = targets_BT - first
    mine = (local >= 0) & (local < size)
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, size - 1)[:, :, None], axis=-1)[:, :, 0]
    log_total = jnp.log(total) + largest
    losses = log_total - all_reduce(jnp.where(mine, picked, 0.0), axes) + terms.z_loss * jnp.square(log_total)
    loss = jnp.sum(losses * weights_BT)
    if not gradient:
        return loss, None, None
    # d/dlogit: softmax (1 + 2 z log Z) - [the target], times the weight.
    hit = (jnp.arange(size)[None, None, :] == local[:, :, None]).astype(jnp.float32)
    slope = powers * ((1 + 2 * terms.z_loss * log_total) / total)[:, :, None] - hit
    slope = (slope * weights_BT[:, :, None]).astype(x_BTD.dtype)
    dx = jnp.einsum("BTV,VD->BTD", slope, table_VD)
    return loss, dx, jnp.einsum("BTV,BTD->VD", slope, x_BTD, preferred_element_type=jnp.float32)


@jax.named_scope(LOSS)
def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Negative log-likelihood of each target in nats, [B, T] float32, equal on all ranks of `axes`.

    `logits_BTV` is this rank's share [B, T, V/ranks]; three small all-reduces of [B, T] join them.
    """
    size = logits_BTV.shape[-1]
    largest = all_max(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), axes)
    total = all_reduce(jnp.sum(jnp.exp(logits_BTV - largest[:, :, None]), axis=-1), axes)
    local = targets_BT - rank(axes) * size
    mine = (local >= 0) & (local < size)
    picked = jnp.take_along_axis(logits_BTV, jnp.clip(local, 0, size - 1)[:, :, None], axis=-1)[:, :, 0]
    target = all_reduce(jnp.where(mine, picked, 0.0), axes)
    return jnp.log(total) + largest - target


def over_chunks(
    chunk: Chunk,
    x_BTD: jax.Array,
    table_VD: jax.Array,
    of_positions: Any,
    *,
    size: int,
    axes: tuple[str, ...],
    gradient: bool,
) -> tuple[Any, ...]:
    """(the sums, and their gradients of x and the table if asked for), at most `size` positions B x T at once.

    of_positions: a tree of further arrays [B, T, ...]; padding is zeros, which must contribute nothing.
    The sums, a tree of float32 scalars, are equal on all ranks of `axes`.
    """
    rows, length, _ = x_BTD.shape
    size = max(1, min(length, size // rows))
    count = -(-length // size)
    if count == 1:
        sums, dx, dtable = chunk(x_BTD, table_VD, of_positions)
        return (sums, dx, dtable.astype(table_VD.dtype)) if gradient else (sums,)

    def chunks(array):  # [B, T, ...] as [chunks, B, size, ...]
        padded = jnp.pad(array, ((0, 0), (0, count * size - length)) + ((0, 0),) * (array.ndim - 2))
        return padded.reshape(rows, count, size, *array.shape[2:]).swapaxes(0, 1)

    def turn(carry, part):
        sums, dx, dtable = chunk(part[0], table_VD, part[1])
        return jax.tree.map(jnp.add, carry, (sums, dtable) if gradient else (sums,)), dx

    parts = jax.tree.map(chunks, (x_BTD, of_positions))
    shapes = jax.eval_shape(lambda part: chunk(part[0], table_VD, part[1])[0], jax.tree.map(lambda a: a[0], parts))
    over = frozenset().union(*map(varying, jax.tree.leaves((x_BTD, of_positions)))) - set(axes)
    zeros = jax.tree.map(lambda a: pvary(jnp.zeros(a.shape), over), shapes)
    # Summed in float32, and rounded to the table's dtype once.
    start = (zeros, pvary(jnp.zeros(table_VD.shape), varying(table_VD))) if gradient else (zeros,)
    done, dx = lax.scan(turn, start, parts)
    if not gradient:
        return done
    whole = dx.swapaxes(0, 1).reshape(rows, count * size, -1)[:, :length]
    return done[0], whole, done[1].astype(table_VD.dtype)
