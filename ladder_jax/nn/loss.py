"""Cross-entropy and the divergence from a teacher, over a vocabulary that stays split, a few
positions at a time.

Each chunk's gradient is computed in the forward pass; backward multiplies it by the loss's
cotangent. No logits are stored or recomputed. The divergence, with both softmaxes of the KL of
logits / tau, is

    loss = (1 - alpha) CE(target) + alpha tau^2 KL(teacher || student)

as in "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), whose tau^2 keeps the
gradient's size. Both models' logits are computed for the same positions, and the teacher has no
gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ladder_jax.nn.parameter import pad_end
from ladder_jax.parallel import all_max, all_reduce, pvary, rank, varying
from ladder_jax.parallel.collectives import EMULATED, Axes
from ladder_jax.scopes import DIVERGENCE, LOSS

Chunk = Callable[..., tuple[Any, Callable[[], Array]]]
"""(x, table, of_positions, constants) -> (sums, slope) of some positions.

The sums are a tree of float32 scalars, of which the first has a gradient. slope: () -> this rank's
[B, T, V/ranks], the derivative of that one by the logits, without the positions' weights.
"""


class Sums(NamedTuple):
    """In nats, each times its positions' weights: `total` is the loss, and has a gradient."""

    total: Array
    cross_entropy: Array
    divergence: Array


@jax.named_scope(LOSS)
def cross_entropy_sum(
    x_BTD: Array,
    table_VD: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    vocab_size: int,
    axes: Axes,
    z_loss: float,
    chunk: int,
) -> Array:
    """The sum of weight x (negative log-likelihood + z_loss x log(Z)^2), in nats, equal on all
    ranks of `axes`.

    x_BTD: the normed stream, equal on all ranks of `axes` but for its type. table_VD: this rank's
    V/ranks rows of the output table; the vocabulary's padding counts for nothing. weights_BT:
    float32.
    z_loss: keeps the softmax's denominator Z near 1 (PaLM, arXiv 2204.02311, section 5).
    chunk: how many positions, B x T, have their float32 logits in memory at once.
    """
    of_chunk = functools.partial(_cross_entropy, vocab_size=vocab_size, axes=axes, z_loss=z_loss)
    return _sums(of_chunk, x_BTD, table_VD, (targets_BT, weights_BT), (), size=chunk, axes=axes)


@jax.named_scope(DIVERGENCE)
def divergence_sum(
    x_BTD: Array,
    table_VD: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    teacher: tuple[Array, Array],
    vocab_size: int,
    axes: Axes,
    alpha: float,
    temperature: float,
    chunk: int,
) -> Sums:
    """Summed over positions, and equal on all ranks of `axes`. The arrays as in
    `cross_entropy_sum`.

    teacher: its normed stream [B, T, D] and this rank's rows of its output table.
    """
    of_chunk = functools.partial(
        _divergence, vocab_size=vocab_size, axes=axes, alpha=alpha, temperature=temperature
    )
    teacher_BTD, teacher_VD = lax.stop_gradient(teacher)
    of_positions = targets_BT, weights_BT, pvary(teacher_BTD, axes)
    return _sums(of_chunk, x_BTD, table_VD, of_positions, (teacher_VD,), size=chunk, axes=axes)


@jax.named_scope(LOSS)
def cross_entropy(logits_BTV: Array, targets_BT: Array, *, axes: Axes) -> Array:
    """Negative log-likelihood of each target in nats, [B, T] float32, equal on all ranks of `axes`.

    `logits_BTV` is this rank's share [B, T, V/ranks]; three small all-reduces of [B, T] join them.
    """
    _, total, largest = _powers(logits_BTV, axes)
    first = rank(axes) * logits_BTV.shape[-1]
    picked = _picked(logits_BTV, targets_BT - first, axes)
    return jnp.log(total) + largest - picked


def _cross_entropy(x_BTD, table_VD, of_positions, constants, *, vocab_size, axes, z_loss):
    """A `Chunk`. of_positions: targets and weights [B, T]."""
    targets_BT, weights_BT = of_positions
    size = table_VD.shape[0]
    first = rank(axes) * size
    logits = _scores(x_BTD, table_VD, _is_token(size, first, vocab_size))
    powers, total, largest = _powers(logits, axes)
    local = targets_BT - first
    picked = _picked(logits, local, axes)
    log_total = jnp.log(total) + largest
    losses = log_total - picked + z_loss * jnp.square(log_total)
    loss = jnp.sum(losses * weights_BT)

    def slope():
        """softmax (1 + 2 z log Z) - [the target]"""
        hit = jnp.arange(size)[None, None, :] == local[:, :, None]
        hit = hit.astype(jnp.float32)
        factor = (1 + 2 * z_loss * log_total) / total
        return powers * factor[:, :, None] - hit

    return loss, slope


def _divergence(x_BTD, table_VD, of_positions, constants, *, vocab_size, axes, alpha, temperature):
    """A `Chunk`. of_positions: targets and weights [B, T], and the teacher's stream; constants: its
    table.
    """
    targets_BT, weights_BT, teacher_BTD = of_positions
    (teacher_VD,) = constants
    size = table_VD.shape[0]
    first = rank(axes) * size
    real = _is_token(size, first, vocab_size)
    logits = _scores(x_BTD, table_VD, real)
    wanted = _scores(teacher_BTD, teacher_VD, real) / temperature
    softened = logits / temperature
    # The softmaxes of: the model, the model at the temperature, the teacher at it. One message for
    # each reduction.
    three = (logits, softened, wanted)
    own = jnp.stack([jnp.max(scores, axis=-1) for scores in three])
    largest = all_max(lax.stop_gradient(own), axes)
    powers = [jnp.exp(scores - most[:, :, None]) for scores, most in zip(three, largest)]
    totals = all_reduce(jnp.stack([jnp.sum(p, axis=-1) for p in powers]), axes)
    log_totals = jnp.log(totals) + largest
    plain, soft, teacher = (p / total[:, :, None] for p, total in zip(powers, totals))
    local = targets_BT - first
    hit = jnp.arange(size)[None, None, :] == local[:, :, None]
    # Of log probabilities: where both are equal the difference is 0, not what rounding leaves of
    # two large sums.
    gaps = (wanted - log_totals[2][:, :, None]) - (softened - log_totals[1][:, :, None])
    share_picked = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
    share_divergence = jnp.sum(teacher * jnp.where(real, gaps, 0.0), axis=-1)
    picked, divergence = all_reduce(jnp.stack([share_picked, share_divergence]), axes)
    losses = log_totals[0] - picked
    mixed = (1 - alpha) * losses + alpha * temperature**2 * divergence
    total, *parts = (jnp.sum(values * weights_BT) for values in (mixed, losses, divergence))
    sums = Sums(total, *map(lax.stop_gradient, parts))
    return sums, lambda: (1 - alpha) * (plain - hit) + alpha * temperature * (soft - teacher)


def _is_token(size, first, vocab_size):
    """[1, 1, V/ranks]: which of this rank's rows are no padding."""
    return (first + jnp.arange(size) < vocab_size)[None, None, :]


def _scores(x_BTD, table_VD, real):
    logits = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD, preferred_element_type=jnp.float32)
    return jnp.where(real, logits, -jnp.inf)


def _powers(logits_BTV, axes):
    """(exp(logits - largest), their sum over the vocabulary, the largest logit): the latter two
    [B, T].
    """
    largest = all_max(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), axes)
    powers = jnp.exp(logits_BTV - largest[:, :, None])
    return powers, all_reduce(jnp.sum(powers, axis=-1), axes), largest


def _picked(logits_BTV, local_BT, axes):
    """The targets' logits [B, T]. local_BT: the targets, counted from this rank's first row."""
    size = logits_BTV.shape[-1]
    mine = (local_BT >= 0) & (local_BT < size)
    inside = jnp.clip(local_BT, 0, size - 1)
    picked = jnp.take_along_axis(logits_BTV, inside[:, :, None], axis=-1)[:, :, 0]
    return all_reduce(jnp.where(mine, picked, 0.0), axes)


def _gradients(slope_BTV, weights_BT, x_BTD, table_VD):
    """Of x and the table. slope: of the loss by the logits, without the positions' weights."""
    slope = (slope_BTV * weights_BT[:, :, None]).astype(x_BTD.dtype)
    dx = jnp.einsum("BTV,VD->BTD", slope, table_VD)
    return dx, jnp.einsum("BTV,BTD->VD", slope, x_BTD, preferred_element_type=jnp.float32)


def _sums(chunk, x_BTD, table_VD, of_positions, constants, *, size, axes):
    """The chunks' sums, over at most `size` positions B x T at once, equal on all ranks of `axes`.

    of_positions: further arrays [B, T, ...]; padding is zeros, which must contribute nothing.
    constants: arrays that all positions share. None of them has a gradient.
    """
    # a `vmap`, which cannot tell a custom gradient that the loss is shared by all ranks
    if EMULATED in axes:
        return _over_chunks(chunk, size, axes, x_BTD, table_VD, of_positions, constants)[0]
    x_BTD = pvary(x_BTD, axes)
    over = varying(x_BTD)
    table_VD, constants = jax.tree.map(lambda a: pvary(a, over), (table_VD, constants))
    return _differentiable(chunk, size, axes, x_BTD, table_VD, of_positions, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _differentiable(chunk, size, axes, *arrays):
    return _over_chunks(chunk, size, axes, *arrays)[0]


def _forward(chunk, size, axes, *arrays):
    sums, *gradients = _over_chunks(chunk, size, axes, *arrays, gradient=True)
    return sums, gradients


def _backward(chunk, size, axes, gradients, factors):
    factor = jax.tree.leaves(factors)[0]
    return *((g * factor).astype(g.dtype) for g in gradients), None, None


_differentiable.defvjp(_forward, _backward)


def _over_chunks(chunk, size, axes, x_BTD, table_VD, of_positions, constants, *, gradient=False):
    """(the sums, and the first one's gradients of x and the table if asked for). of_positions:
    targets, weights, ...
    """
    rows, length, _ = x_BTD.shape
    positions = rows * length
    size = min(positions, size)
    count = -(-positions // size)

    def of_part(x, others):
        """(the sums, dx in its dtype or None, dtable in float32, rounded at the end, or None)"""
        sums, slope = chunk(x, table_VD, others, constants)
        if not gradient:
            return sums, None, None
        return sums, *_gradients(slope(), others[1], x, table_VD)

    if count == 1:
        sums, dx, dtable = of_part(x_BTD, of_positions)
        return (sums, dx, dtable.astype(table_VD.dtype)) if gradient else (sums,)

    def chunks(array):  # [B, T, ...] as [chunks, 1, size, ...]
        flat = array.reshape(positions, *array.shape[2:])
        padded = pad_end(flat, axis=0, by=count * size - positions)
        return padded.reshape(count, 1, size, *array.shape[2:])

    def turn(carry, part):
        sums, dx, dtable = of_part(*part)
        return jax.tree.map(jnp.add, carry, (sums, dtable)), dx

    parts = jax.tree.map(chunks, (x_BTD, of_positions))
    sums, _, dtable = jax.eval_shape(of_part, *jax.tree.map(lambda a: a[0], parts))
    zeros = jax.tree.map(jnp.zeros_like, (sums, dtable))
    (sums, dtable), dx = lax.scan(turn, zeros, parts)
    if not gradient:
        return (sums,)
    dx = dx.reshape(count * size, -1)[:positions].reshape(x_BTD.shape)
    return sums, dx, dtable.astype(table_VD.dtype)
