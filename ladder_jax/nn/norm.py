"""RMSNorm (https://arxiv.org/abs/1910.07467), computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.nn.parameter import Sizes, declare, ones


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, which is `dim` (D, or H for query/key norms)."""

    def __init__(self, sizes: Sizes, *, dim: str = "D"):
        self.eps = sizes.config.norm_eps
        self.scale = declare(dim, sizes=sizes, init=ones)

    def __call__(self, x: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        """x [..., D] in any dtype to [..., D] in `dtype`."""
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x * scale).astype(dtype)
