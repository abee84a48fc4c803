"""Grouped matmuls: rows that are sorted by group, each times its group's matrix. Letters as in nn/experts.py."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel import pvary, varying
from ladder_jax.residual import MATMUL


class Groups(NamedTuple):
    """The order of rows by expert. R rows are sorted, of which this rank's come first.

    order: [R], the row that stands in each sorted place; place: [R], its inverse; sizes: [E], of each expert's group.
    """

    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @property
    def mine(self) -> jax.Array:
        """[R, 1]: which sorted rows are of this rank's experts. What a kernel leaves in the others is undefined."""
        return (jnp.arange(len(self.order)) < jnp.sum(self.sizes))[:, None]

    @property
    def experts(self) -> jax.Array:
        """[R]: the expert of each sorted row; of the other ranks' rows any."""
        ends = jnp.cumsum(self.sizes)
        found = jnp.searchsorted(ends, jnp.arange(len(self.order)), side="right")
        return jnp.minimum(found, len(self.sizes) - 1)


def grouped_matmul(rows_RI: jax.Array, weight_EIO: jax.Array | Int8, groups: Groups) -> jax.Array:
    """[R, O]: each row times its expert's matrix, in its dtype; undefined in the rows of other ranks' experts.

    As `quantized.einsum`: a weight's gradient is added over rows in float32 and rounded once.
    """
    if isinstance(weight_EIO, Int8):
        sums = lax.ragged_dot(
            rows_RI, weight_EIO.values.astype(rows_RI.dtype), groups.sizes, preferred_element_type=jnp.float32
        )
        return (sums * jnp.take(weight_EIO.scale, groups.experts, axis=0)).astype(rows_RI.dtype)
    axes = varying(rows_RI) | varying(weight_EIO)
    return checkpoint_name(_grouped(pvary(rows_RI, axes), pvary(weight_EIO, axes), groups), MATMUL)


@jax.custom_vjp
def _grouped(rows: jax.Array, weight: jax.Array, groups: Groups) -> jax.Array:
    return lax.ragged_dot(rows, weight.astype(rows.dtype), groups.sizes)


def _grouped_forward(rows: jax.Array, weight: jax.Array, groups: Groups) -> tuple:
    used = weight.astype(rows.dtype)
    return _grouped(rows, used, groups), (rows, used, groups, jnp.zeros((), weight.dtype))


# sum over the rows of a group: [R, I] and [R, O] to [E, I, O]
_OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _grouped_backward(residuals: tuple, gradient: jax.Array) -> tuple:
    rows, weight, groups, like = residuals
    rows, gradient = jnp.where(groups.mine, rows, 0), jnp.where(groups.mine, gradient, 0)
    of_rows = jnp.where(groups.mine, lax.ragged_dot(gradient, weight.swapaxes(1, 2), groups.sizes), 0)
    summed = lax.ragged_dot_general(rows, gradient, groups.sizes, _OVER_ROWS, preferred_element_type=jnp.float32)
    return of_rows.astype(rows.dtype), summed.astype(rows.dtype).astype(like.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
