"""Launch and await: a topology's all-reduces, and the barriers that keep them apart in each direction."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.parallel import explicit
from ladder_jax.parallel.collectives import ENTER, LAUNCH, all_reduce, pvary, ranks

Sums = tuple[jax.Array | None, ...]  # oldest first; None is zero

REDUCED = "reduced"
"""The checkpoint name of every reduced sum: a remat policy that does not save it reduces again."""


def reduced(partial: jax.Array | None, axes: tuple[str, ...], scope: str = "") -> jax.Array | None:
    """The sum of every rank's partial: where a topology communicates, named so that a program can be searched."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}" if scope else LAUNCH):
        return checkpoint_name(all_reduce(partial, axes), REDUCED)


def opaque_copy(partial: jax.Array | None, axes: tuple[str, ...]) -> jax.Array | None:
    """A copy of `partial` that the compiler cannot identify with it: the all-reduce's operand, where a sublayer reads
    `partial` too.

    Without it v5e hides no all-reduce, because it fuses one with matmuls only where nothing else reads its operand;
    and v5p, unrolled, hides 3 of 8 instead of 7, because it issues every second one after the matmuls.
    """
    if partial is None or ranks(axes) == 1:
        return partial
    return jnp.where(lax.axis_index(axes) >= 0, partial, 0)


def start(partial: jax.Array | None, axes: tuple[str, ...], scope: str) -> Any:
    """`reduced` as an explicit asynchronous pair: this starts the all-reduce, and its `done()` is the sum."""
    if partial is None:
        return None
    with jax.named_scope(f"{LAUNCH}/{scope}"):
        return explicit.start(partial, axes)


def to_sublayer_input(stream: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`stream` as a sublayer's input. Its transpose is the all-reduce of the input's gradient."""
    with jax.named_scope(ENTER):
        return pvary(stream, axes)


def await_forward(partial: jax.Array, launched: Sums, axes: tuple[str, ...]) -> tuple[jax.Array, Sums]:
    """Barrier between a step's output and the newest all-reduce, so that the next one cannot be merged with it.

    Without effect on one rank, and in the first step, where no all-reduce is in flight.
    """
    *older, newest = launched
    if newest is None or ranks(axes) == 1:
        return partial, launched
    partial, newest = barrier_forward((partial, newest))
    return partial, (*older, newest)


def await_backward(
    entered: jax.Array, residual: jax.Array, launched: Sums, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, Sums]:
    """The same barrier for the backward pass, where the gradient of a step's input is all-reduced.

    The gradient of `entered` is this rank's partial sum, reduced next; that of `residual` holds the later step's
    all-reduce. The earlier step's backward starts from the gradient of the newest output: it must come after this
    step's, because the next all-reduce hides under it.
    """
    if ranks(axes) == 1:
        return entered, residual, launched
    if not launched or launched[-1] is None:
        return (*_barrier_backward((entered, residual)), launched)
    entered, residual, newest = _barrier_backward((entered, residual, launched[-1]))
    return entered, residual, (*launched[:-1], newest)


@jax.custom_vjp
def barrier_forward(arrays):
    """`optimization_barrier` forward, identity backward."""
    return lax.optimization_barrier(arrays)


@jax.custom_vjp
def _barrier_backward(arrays):
    """Identity forward, `optimization_barrier` backward."""
    return arrays


barrier_forward.defvjp(lambda arrays: (barrier_forward(arrays), None), lambda _, cotangents: (cotangents,))
_barrier_backward.defvjp(lambda arrays: (arrays, None), lambda _, cotangents: (lax.optimization_barrier(cotangents),))
