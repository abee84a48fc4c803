"""A sum over all positions whose gradient is made in the forward pass, a few positions at a time.

While a chunk's logits are there its gradient is made of them: nothing is kept of them and nothing computed twice.
(A loss is where a backward pass starts: all that is missing is a factor.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.parallel import pvary, varying

# (x, table, of_positions) -> (sums, dx or None, dtable or None) of some positions
Chunk = Callable[[jax.Array, jax.Array, Any], tuple[Any, jax.Array | None, jax.Array | None]]


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

    of_positions: a tree of further arrays [B, T, ...]; where it is padded, zero must mean that nothing counts.
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
