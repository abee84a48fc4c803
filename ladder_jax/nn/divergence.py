"""How far a model's predictions are from a teacher's, over a vocabulary that stays split (see loss.py).

    loss = (1 - alpha) CE(target) + alpha tau^2 KL(teacher || student),    both softmaxes of the KL of logits / tau

as in "Distilling the Knowledge in a Neural Network" (arXiv 1503.02531), whose tau^2 keeps the gradient's size. Both
models' logits are computed for a few positions at a time, and the teacher has no gradient.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.nn.loss import over_chunks
from ladder_jax.parallel import all_max, all_reduce, pvary, rank, varying
from ladder_jax.parallel.collectives import DIVERGENCE, EMULATED


class Terms(NamedTuple):
    """Hashable, as what a custom gradient must know beside its arrays."""

    vocab_size: int
    axes: tuple[str, ...]
    alpha: float
    temperature: float
    chunk: int


class Sums(NamedTuple):
    """In nats, each times its positions' weights: `total` is the loss, and has a gradient."""

    total: jax.Array
    cross_entropy: jax.Array
    divergence: jax.Array


@jax.named_scope(DIVERGENCE)
def divergence_sum(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    teacher: tuple[jax.Array, jax.Array],
    vocab_size: int,
    axes: tuple[str, ...],
    alpha: float = 1.0,
    temperature: float = 1.0,
    chunk: int = 2048,
) -> Sums:
    """Summed over positions, and equal on all ranks of `axes`. The arrays as in `loss.cross_entropy_sum`.

    teacher: its normed stream [B, T, D] and this rank's rows of its output table.
    """
    terms = Terms(vocab_size, axes, alpha, temperature, chunk)
    teacher = lax.stop_gradient(teacher)
    if EMULATED in axes:  # as in `loss.cross_entropy_sum`
        return _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms, gradient=False)[0]
    x_BTD = pvary(x_BTD, axes)
    table_VD = pvary(table_VD, varying(x_BTD))
    teacher = (pvary(teacher[0], axes), pvary(teacher[1], varying(x_BTD)))
    return _summed(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms):
    return _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms, gradient=False)[0]


def _forward(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms):
    sums, *gradients = _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms, gradient=True)
    return sums, gradients


def _backward(_, gradients, factors):
    return *((g * factors.total).astype(g.dtype) for g in gradients), None, None, None


_summed.defvjp(_forward, _backward)


def _over_chunks(x_BTD, table_VD, targets_BT, weights_BT, teacher, terms: Terms, *, gradient: bool):
    """(the sums, the total's gradients of x and the table, if asked for)."""
    chunk = lambda x, table, others: _chunk(x, table, *others, teacher[1], terms, gradient=gradient)
    settings = dict(size=terms.chunk, axes=terms.axes, gradient=gradient)
    return over_chunks(chunk, x_BTD, table_VD, (targets_BT, weights_BT, teacher[0]), **settings)


def _chunk(x, table, targets, weights, teacher_x, teacher_table, terms: Terms, *, gradient: bool):
    """(the sums, gradients of x in its dtype and of the table in float32, both this rank's own) of a few positions."""
    size, axes, tau = table.shape[0], terms.axes, terms.temperature
    first = rank(axes) * size
    real = (first + jnp.arange(size) < terms.vocab_size)[None, None, :]
    score = lambda x, table: jnp.einsum("BTD,VD->BTV", x, table, preferred_element_type=jnp.float32)
    logits = jnp.where(real, score(x, table), -jnp.inf)
    wanted = jnp.where(real, score(teacher_x, teacher_table), -jnp.inf) / tau
    softened = logits / tau
    # The softmaxes of: the model, the model at the temperature, the teacher at it. One message for each reduction.
    three = (logits, softened, wanted)
    largest = all_max(lax.stop_gradient(jnp.stack([jnp.max(scores, axis=-1) for scores in three])), axes)
    powers = [jnp.exp(scores - most[:, :, None]) for scores, most in zip(three, largest)]
    totals = all_reduce(jnp.stack([jnp.sum(p, axis=-1) for p in powers]), axes)
    log_totals = jnp.log(totals) + largest
    plain, soft, teacher = (p / total[:, :, None] for p, total in zip(powers, totals))
    local = targets - first
    hit = jnp.arange(size)[None, None, :] == local[:, :, None]
    # Of log probabilities: where both are equal the difference is 0, not what rounding leaves of two large sums.
    gaps = (wanted - log_totals[2][:, :, None]) - (softened - log_totals[1][:, :, None])
    shares = jnp.stack([
        jnp.sum(jnp.where(hit, logits, 0.0), axis=-1),
        jnp.sum(teacher * jnp.where(real, gaps, 0.0), axis=-1),
    ])  # fmt: skip
    picked, divergence = all_reduce(shares, axes)
    losses = log_totals[0] - picked
    summed = lambda values: jnp.sum(values * weights)
    mixed = (1 - terms.alpha) * losses + terms.alpha * tau**2 * divergence
    sums = Sums(summed(mixed), *map(lax.stop_gradient, (summed(losses), summed(divergence))))
    if not gradient:
        return sums, None, None
    slope = (1 - terms.alpha) * (plain - hit) + terms.alpha * tau * (soft - teacher)
    slope = (slope * weights[:, :, None]).astype(x.dtype)
    dx = jnp.einsum("BTV,VD->BTD", slope, table)
    return sums, dx, jnp.einsum("BTV,BTD->VD", slope, x, preferred_element_type=jnp.float32)
