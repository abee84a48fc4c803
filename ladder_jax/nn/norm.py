"""RMSNorm (https://arxiv.org/abs/1910.07467), computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import ModelConfig
from ladder_jax.nn.parameter import Sizes, declare, ones, sizes_of


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, which is `dim` (D, or H for query/key norms)."""

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None, dim: str = "D"):
        sizes = sizes_of(config)
        self.eps = sizes.config.norm_eps
        self.scale = declare(dim, sizes=sizes, init=ones, rngs=rngs)

    def __call__(self, x: jax.Array, *, dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., D] in any dtype to [..., D] in `dtype`, by default x's."""
        dtype = x.dtype if dtype is None else dtype
        return self.gain(normalise(x, eps=self.eps), dtype=dtype)

    def gain(self, x: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        """`x`, normalised before, times the gain."""
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x.astype(jnp.float32) * scale).astype(dtype)


def normalise(x: jax.Array, *, eps: float) -> jax.Array:
    """x / rms(x) over the last dimension, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
