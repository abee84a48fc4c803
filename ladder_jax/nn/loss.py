"""Cross-entropy over a vocabulary that stays split; `cross_entropy_sum` makes the logits of few positions at a time."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.nn.chunked import over_chunks
from ladder_jax.parallel import all_max, all_reduce, pvary, rank, varying
from ladder_jax.parallel.collectives import EMULATED, LOSS


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
    chunk: the most positions, B x T, whose float32 logits are there at once.
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
