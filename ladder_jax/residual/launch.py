"""Launch and await: a topology's all-reduces, and the barriers that keep them apart in each direction."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.parallel import explicit
from ladder_jax.parallel.collectives import ENTER, LAUNCH, all_reduce, ranks, vary

Sums = tuple[jax.Array | None, ...]  # oldest first; None is zero

REDUCED = "reduced"
"""The checkpoint name of every reduced sum: a remat policy that does not save it reduces again."""


def reduced(partial: jax.Array | None, axes: tuple[str, ...], scope: str = "") -> jax.Array | None:
    """The sum of every rank's partial: where a topology communicates, named so that a program can be searched."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        return checkpoint_name(all_reduce(partial, axes), REDUCED)


def set_apart(partial: jax.Array | None, axes: tuple[str, ...]) -> jax.Array | None:
    """`partial`, by an operation that compilers cannot see through, for a reduction beside which it is read.

    Else v5e hides none: it fuses an all-reduce with matmuls only where nothing else reads its operand.
    And v5p, unrolled, hides 3 of 8 instead of 7: it issues every second one after the matmuls.
    """
    if partial is None or ranks(axes) == 1:
        return partial
    return jnp.where(lax.axis_index(axes) >= 0, partial, 0)


def start(partial: jax.Array | None, axes: tuple[str, ...], scope: str) -> Any:
    """`reduced` by name: an all-reduce in flight, whose `done()` is the sum."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}"):
        return explicit.start(partial, axes)


def enter(stream: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`stream` as a sublayer's input: one place, whose transpose reduces the gradient."""
    with jax.named_scope(ENTER):
        return vary(stream, axes)


def await_forward(partial: jax.Array, launched: Sums, axes: tuple[str, ...]) -> tuple[jax.Array, Sums]:
    """Tie a step's output to the newest all-reduce in flight, so that the next one cannot join it.

    One rank has nothing to hide, and in the first step nothing is in flight.
    """
    *older, newest = launched
    if newest is None or ranks(axes) == 1:
        return partial, launched
    partial, newest = tie_forward((partial, newest))
    return partial, (*older, newest)


def await_backward(
    entered: jax.Array, residual: jax.Array, launched: Sums, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, Sums]:
    """The same for the backward pass, where the step's input has an all-reduce in flight.

    The gradient of `entered` is this rank's partial sum, reduced next; that of `residual` holds the
    later step's, reduced meanwhile; and that of the newest output is where the earlier step begins,
    which must not run ahead of this one: it is what the next reduction is to hide under.
    """
    if ranks(axes) == 1:
        return entered, residual, launched
    if not launched or launched[-1] is None:
        return (*_tie_backward((entered, residual)), launched)
    entered, residual, newest = _tie_backward((entered, residual, launched[-1]))
    return entered, residual, (*launched[:-1], newest)


@jax.custom_vjp
def tie_forward(arrays):
    """The arrays, each of which is there only when all are; their gradients are independent."""
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def _tie_backward(arrays):
    return arrays


tie_forward.defvjp(lambda arrays: (tie_forward(arrays), None), lambda _, cotangents: (cotangents,))
_tie_backward.defvjp(lambda arrays: (arrays, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),))
