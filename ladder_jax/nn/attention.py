"""The attention sublayer: grouped-query attention with rotary positions and a key/value cache."""

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Biases
from ladder_jax.nn import bias, kernels, quantized, rotary
from ladder_jax.nn.norm import RMSNorm
from ladder_jax.nn.parameter import Initializer, Normal, Sizes, declare, zeros
from ladder_jax.nn.positions import Cache, Positions


class Attention(nnx.Module):
    """Under tensor parallelism the heads are split; the output projection gives a partial sum.

    With fewer key/value heads than ranks, several ranks hold (and cache) the same head.
    """

    def __init__(self, sizes: Sizes, *, out_init: Initializer):
        config = sizes.config
        if sizes.fused:
            self.query_key_value = declare("DJH", sizes=sizes, init=Normal(0.02))
        else:
            self.query = declare("DNH", sizes=sizes, init=Normal(0.02))
            self.key = declare("DKH", sizes=sizes, init=Normal(0.02))
            self.value = declare("DKH", sizes=sizes, init=Normal(0.02))
        self.out = declare("NHD", sizes=sizes, init=out_init)
        if config.biases is not Biases.NONE:
            self.query_bias = declare("NH", sizes=sizes, init=zeros)
            self.key_bias = declare("KH", sizes=sizes, init=zeros)
            self.value_bias = declare("KH", sizes=sizes, init=zeros)
        if config.biases in (Biases.ATTENTION, Biases.ALL):
            self.out_bias = declare("D", sizes=sizes, init=zeros)
        if config.qk_norm:
            self.query_norm = RMSNorm(sizes, dim="H")
            self.key_norm = RMSNorm(sizes, dim="H")

    def __call__(
        self,
        x_BTD: jax.Array,
        *,
        table: tuple[jax.Array, jax.Array],
        kernel: kernels.Kernel,
        first_rank: jax.Array,
        positions: Positions,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """A rank's partial sum [B, T, D], and the cache with this block's keys and values written.

        table: cosines and sines of the block's positions, each [B, T, H/2] (or [1, T, H/2]).
        positions: which positions these are, and so what of the cache they see.
        first_rank: True on the one rank that adds the output bias.
        """
        query, key, value = self._project(x_BTD, table)
        attended, cache = positions.attend(query, key, value, cache=cache, kernel=kernel)
        out = quantized.einsum("BTNH,NHD->BTD", attended, self.out.get_value())
        if hasattr(self, "out_bias"):
            out = bias.add(out, jnp.where(first_rank, self.out_bias[...], 0))
        return out, cache

    def _project(self, x_BTD: jax.Array, table: tuple[jax.Array, jax.Array]):
        dtype = x_BTD.dtype
        query, key, value = self._matmuls(x_BTD)
        if hasattr(self, "query_bias"):
            query = bias.add(query, self.query_bias[...])
            key = bias.add(key, self.key_bias[...])
            value = bias.add(value, self.value_bias[...])
        if hasattr(self, "query_norm"):
            query = self.query_norm(query, dtype=dtype)
            key = self.key_norm(key, dtype=dtype)
        return rotary.rotate(query, table), rotary.rotate(key, table), value

    def _matmuls(self, x_BTD: jax.Array) -> list[jax.Array]:
        if hasattr(self, "query_key_value"):
            fused = quantized.einsum("BTD,DJH->BTJH", x_BTD, self.query_key_value.get_value())
            heads = self.out.get_value().shape[0]
            return jnp.split(fused, [heads, (heads + fused.shape[2]) // 2], axis=2)
        return [
            quantized.einsum("BTD,DNH->BTNH", x_BTD, self.query.get_value()),
            quantized.einsum("BTD,DKH->BTKH", x_BTD, self.key.get_value()),
            quantized.einsum("BTD,DKH->BTKH", x_BTD, self.value.get_value()),
        ]
