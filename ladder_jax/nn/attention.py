"""The attention sublayer: grouped-query attention with rotary positions and a key/value cache."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Biases, ModelConfig
from ladder_jax.nn import bias, kernels, quantized, rotary
from ladder_jax.nn.norm import RMSNorm
from ladder_jax.nn.parameter import Normal, Sizes, declare, residual_writer, sizes_of, zeros
from ladder_jax.nn.positions import FULL_SEQUENCE, Cache, Positions


class Attention(nnx.Module):
    """Under tensor parallelism the heads are split; the output projection gives a partial sum.

    With fewer key/value heads than ranks, several ranks hold (and cache) the same head. `Attention(config,
    rngs=nnx.Rngs(0))(x)` is the whole sublayer on one device; inside `jax.shard_map` see MLP.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config)
        config, new = sizes.config, functools.partial(declare, sizes=sizes, rngs=rngs)
        self.config = config
        if sizes.fused:
            self.query_key_value = new("DJH", init=Normal(0.02))
        else:
            self.query = new("DNH", init=Normal(0.02))
            self.key = new("DKH", init=Normal(0.02))
            self.value = new("DKH", init=Normal(0.02))
        self.out = new("NHD", init=residual_writer(config))
        if config.biases is not Biases.NONE:
            self.query_bias = new("NH", init=zeros)
            self.key_bias = new("KH", init=zeros)
            self.value_bias = new("KH", init=zeros)
        if config.biases in (Biases.ATTENTION, Biases.ALL):
            self.out_bias = new("D", init=zeros)
        if config.qk_norm:
            self.query_norm = RMSNorm(sizes, rngs=rngs, dim="H")
            self.key_norm = RMSNorm(sizes, rngs=rngs, dim="H")

    def __call__(self, x_BTD: jax.Array, *, first_rank: jax.Array | bool = True) -> jax.Array:
        """A rank's partial sum [B, T, D] of causal attention at positions 0..T-1. first_rank: as in `with_cache`."""
        table = rotary.tables(FULL_SEQUENCE.indices(x_BTD.shape[1]), config=self.config)
        settings = dict(table=table, kernel=kernels.Kernel.XLA, first_rank=first_rank, positions=FULL_SEQUENCE)
        return self.with_cache(x_BTD, None, **settings)[0]

    def with_cache(
        self,
        x_BTD: jax.Array,
        cache: Cache | None,
        *,
        table: tuple[jax.Array, jax.Array],
        kernel: kernels.Kernel,
        first_rank: jax.Array | bool,
        positions: Positions,
    ) -> tuple[jax.Array, Cache | None]:
        """A rank's partial sum [B, T, D], and the cache with this block's keys and values written.

        table: cosines and sines of the block's positions, each [B, T, H/2] (or [1, T, H/2]).
        positions: the block's, which decide what of the cache it sees.
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
