"""Grouped matmuls: rows that are sorted by group, each times its group's matrix. Letters as in
nn/experts.py.
"""

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.errors import unknown
from ladder_jax.nn.quantized import Int8
from ladder_jax.parallel.collectives import varying_alike
from ladder_jax.residual import MATMUL

# in the environment: "xla" keeps Triton's kernel from being chosen
VARIABLE = "LADDER_JAX_GROUPED_MATMUL"


def uses_triton(dtype: jnp.dtype) -> bool:
    """Whether rows of this dtype have Triton's kernel (nn/grouped_gpu.py) on the devices of the mesh
    around the caller: NVIDIA GPUs, in bfloat16. Others have `lax.ragged_dot`: XLA's kernel on TPUs;
    elsewhere every row is multiplied with every matrix.

    Raises UserError where `VARIABLE` has another value than "xla".
    """
    if (value := os.environ.get(VARIABLE)) not in (None, "", "xla"):
        raise unknown(VARIABLE, value, ["xla"])
    if value or dtype != jnp.bfloat16 or not _device_kind().startswith("NVIDIA"):
        return False
    try:
        from jax.experimental.pallas import triton

        return triton.get_gpu_info().compute_capability >= 80
    except (ImportError, ValueError):  # a jax that has removed it, or a GPU that it does not know
        return False


def _device_kind():
    """Of the mesh around the caller, not of this machine: a program may be compiled ahead of time.
    "" without one.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device else ""


class Groups(NamedTuple):
    """The order of rows by expert. R rows are sorted, of which this rank's come first.

    order: [R], the row that stands in each sorted place; place: [R], its inverse; sizes: [E], of
        each expert's group.
    """

    order: Array
    place: Array
    sizes: Array

    @property
    def mine(self) -> Array:
        """[R, 1]: which sorted rows are of this rank's experts. What a kernel leaves in the others
        is undefined.
        """
        return (jnp.arange(len(self.order)) < jnp.sum(self.sizes))[:, None]

    @property
    def experts(self) -> Array:
        """[R]: the expert of each sorted row; of the other ranks' rows any."""
        ends = jnp.cumsum(self.sizes)
        found = jnp.searchsorted(ends, jnp.arange(len(self.order)), side="right")
        return jnp.minimum(found, len(self.sizes) - 1)


def grouped_matmul(rows_RI: Array, weight_EIO: Array | Int8, groups: Groups) -> Array:
    """[R, O]: each row times its expert's matrix, in its dtype; undefined in the rows of other
    ranks' experts.

    As `quantized.einsum`: a weight's gradient is added over rows in float32 and rounded once, and
    an object may have its own way (retrain/lora.py).
    """
    if hasattr(weight_EIO, "grouped"):
        return weight_EIO.grouped(rows_RI, groups)
    if isinstance(weight_EIO, Int8):
        return _quantized(rows_RI, weight_EIO, groups)
    return checkpoint_name(_grouped(*varying_alike(rows_RI, weight_EIO), groups), MATMUL)


def _quantized(rows, weight, groups):
    if uses_triton(rows.dtype):
        from ladder_jax.nn import grouped_gpu

        return grouped_gpu.product(rows, weight.values, groups.sizes, scale_EO=weight.scale)
    # XLA's kernels on TPUs read bytes, and convert the tiles that they visit: of a TPU7x XLA makes
    # all of it float32.
    values = (
        weight.values.astype(rows.dtype) if _device_kind().startswith("TPU7") else weight.values
    )
    sums = lax.ragged_dot(rows, values, groups.sizes, preferred_element_type=jnp.float32)
    return (sums * jnp.take(weight.scale, groups.experts, axis=0)).astype(rows.dtype)


@jax.custom_vjp
def _grouped(rows, weight, groups):
    if uses_triton(rows.dtype):
        from ladder_jax.nn import grouped_gpu  # Pallas is slow to import

        return grouped_gpu.product(rows, weight.astype(rows.dtype), groups.sizes)
    return lax.ragged_dot(rows, weight.astype(rows.dtype), groups.sizes)


def _grouped_forward(rows, weight, groups):
    used = weight.astype(rows.dtype)
    out = _grouped.__wrapped__(rows, used, groups)
    return out, (rows, used, groups, jnp.zeros((), weight.dtype))


# sum over the rows of a group: [R, I] and [R, O] to [E, I, O]
OVER_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def _grouped_backward(residuals, gradient):
    rows, weight, groups, like = residuals
    if uses_triton(rows.dtype):
        from ladder_jax.nn import grouped_gpu

        of_rows = grouped_gpu.product(gradient, weight, groups.sizes, transposed=True)
        summed = grouped_gpu.over_rows(rows, gradient, groups.sizes)
    else:
        rows = jnp.where(groups.mine, rows, 0)
        gradient = jnp.where(groups.mine, gradient, 0)
        of_rows = lax.ragged_dot(gradient, weight.swapaxes(1, 2), groups.sizes)
        summed = lax.ragged_dot_general(
            rows, gradient, groups.sizes, OVER_ROWS, preferred_element_type=jnp.float32
        )
    of_rows = jnp.where(groups.mine, of_rows, 0)
    return of_rows.astype(rows.dtype), summed.astype(rows.dtype).astype(like.dtype), None


_grouped.defvjp(_grouped_forward, _grouped_backward)
