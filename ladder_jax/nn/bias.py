"""A bias beside a matmul."""

import jax
import jax.numpy as jnp


def add(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [B, T, ...] plus a float32 bias [...], in x's dtype.

    Added in float32, for the gradient's sake: the bias's is a sum over all positions, in the dtype of the addition.
    """
    return (x.astype(jnp.float32) + bias[None, None]).astype(x.dtype)
