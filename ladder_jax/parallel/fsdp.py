"""Parameters split over the fsdp axis (ZeRO-3, arXiv 1910.02054): whole only while a layer computes with them.

A rank holds its share of every array along D. Forward, a layer's shares are gathered in the dtype in which they
are used; backward they are gathered again, and each gradient goes back to its shares by one reduce-scatter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ladder_jax.parallel.collectives import all_gather, reduce_scatter
from ladder_jax.parallel.mesh import FSDP, Layout

GATHERED = "gathered"
"""The checkpoint name of gathered parameters, which no remat policy may save: it would save the whole model."""


def whole(params: Any, dims: Any, *, layout: Layout, dtype: jnp.dtype) -> Any:
    """The arrays of `params`, a rank's shares, as this rank computes with them: all of D, matrices in `dtype`.

    dims: a tree of the arrays' dimensions, such as "DNH". Where nothing is split, `params` as they are.
    Gradients arrive in float32, summed over the ranks of the axis in it.
    """
    if layout.fsdp == 1:
        return params
    return jax.tree.map(lambda dims, a: _whole(a, dims, dtype), dims, params)


def _whole(array: jax.Array, dims: str, dtype: jnp.dtype) -> jax.Array:
    if "D" not in dims:
        return array
    target = jnp.dtype(dtype if len(dims) > 1 else array.dtype)  # norm gains multiply in float32
    return checkpoint_name(_gather(array, dims.index("D"), target), GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(share: jax.Array, axis: int, dtype: jnp.dtype) -> jax.Array:
    return all_gather(share.astype(dtype), (FSDP,), dimension=axis)


def _scatter(axis: int, _, share_like, gradient: jax.Array) -> tuple[jax.Array]:
    summed = reduce_scatter(gradient.astype(jnp.float32), (FSDP,), dimension=axis)
    return (summed.astype(share_like.dtype),)


_gather.defvjp(lambda share, axis, dtype: (_gather(share, axis, dtype), jnp.zeros((), share.dtype)), _scatter)
