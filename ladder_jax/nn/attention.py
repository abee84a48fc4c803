"""The attention sublayer: grouped-query attention with rotary positions and a key/value cache."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Biases
from ladder_jax.nn import kernels, quantized, rotary
from ladder_jax.nn.norm import RMSNorm
from ladder_jax.nn.parameter import Initializer, Normal, Sizes, declare, zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """One layer's keys and values, each a rank's [B, S, K, H]; row b is filled up to its length."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Under tensor parallelism the heads are split; the output projection gives a partial sum.

    With fewer key/value heads than ranks, several ranks hold (and cache) the same head.
    """

    def __init__(self, sizes: Sizes, *, out_init: Initializer):
        config = sizes.config
        self.query = declare("DNH", sizes=sizes, init=Normal(0.02))
        self.key = declare("DKH", sizes=sizes, init=Normal(0.02))
        self.value = declare("DKH", sizes=sizes, init=Normal(0.02))
        self.out = declare("NHD", sizes=sizes, init=out_init)
        if config.biases is not Biases.NONE:
            self.query_bias = declare("NH", sizes=sizes, init=zeros)
            self.key_bias = declare("KH", sizes=sizes, init=zeros)
            self.value_bias = declare("KH", sizes=sizes, init=zeros)
        if config.biases is Biases.ALL:
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
        cache: Cache | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """A rank's partial sum [B, T, D], and the cache with this block's keys and values written.

        table: cosines and sines of the block's positions, each [B, T, H/2].
        cache, lengths [B]: without them, the block attends causally to itself; with a cache and
            no lengths likewise, and fills it from its start (prefill); with both, T is 1 and row b
            is at position lengths[b] (decode).
        first_rank: True on the one rank that adds the output bias.
        """
        query, key, value = self._project(x_BTD, table)
        if cache is None:
            attended = kernels.causal(query, key, value, kernel=kernel)
        elif lengths is None:
            cache = Cache(
                jax.lax.dynamic_update_slice_in_dim(cache.key, key, 0, axis=1),
                jax.lax.dynamic_update_slice_in_dim(cache.value, value, 0, axis=1),
            )
            attended = kernels.causal(query, key, value, kernel=kernel)
        else:
            rows = jnp.arange(key.shape[0])
            cache = Cache(
                cache.key.at[rows, lengths].set(key[:, 0], unique_indices=True),
                cache.value.at[rows, lengths].set(value[:, 0], unique_indices=True),
            )
            attended = kernels.decode(query, cache.key, cache.value, lengths + 1, kernel=kernel)
        out = quantized.einsum("BTNH,NHD->BTD", attended, self.out.get_value())
        if hasattr(self, "out_bias"):
            out = out + jnp.where(first_rank, self.out_bias[...], 0).astype(out.dtype)[None, None, :]
        return out, cache

    def _project(self, x_BTD: jax.Array, table: tuple[jax.Array, jax.Array]):
        dtype = x_BTD.dtype
        query = quantized.einsum("BTD,DNH->BTNH", x_BTD, self.query.get_value())
        key = quantized.einsum("BTD,DKH->BTKH", x_BTD, self.key.get_value())
        value = quantized.einsum("BTD,DKH->BTKH", x_BTD, self.value.get_value())
        if hasattr(self, "query_bias"):
            query = query + self.query_bias[...].astype(dtype)[None, None]
            key = key + self.key_bias[...].astype(dtype)[None, None]
            value = value + self.value_bias[...].astype(dtype)[None, None]
        if hasattr(self, "query_norm"):
            query = self.query_norm(query, dtype=dtype)
            key = self.key_norm(key, dtype=dtype)
        return rotary.rotate(query, table), rotary.rotate(key, table), value
