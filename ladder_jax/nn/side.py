"""A side network: ladder side-tuning (arXiv 2206.06522). It trains, and the model that it stands beside is frozen.

    h_0 = D x_0                                             the embedding, projected down
    h   = mu_l h_l-1 + (1 - mu_l) W_l x_l                   mu_l = sigmoid(alpha_l / T), T = 0.1, alpha_l = 0 at first
    h_l = h + attention(norm(h)),  then  h_l + MLP(norm(h_l))
    y   = x_L + U norm(h_L)                                 before the model's final norm and head

x_l is the residual stream after layer l as it stands: of a ladder's layer without the outputs that are still pending.
U is zero at first, so that the model's function is unchanged. Block l runs in the loop body of layer l. No gradient
passes a tap (W_l x_l), so that nothing of the model is kept for the backward pass but the taps' streams.

Every rank holds the whole network and computes the same with it, on streams that are equal on all tensor ranks: it
communicates nothing. The small letters of its dimensions say so: d, n, k, h, f as D, N, K, H, F of the model; b is the
model's width, i one number.
"""

import math

import jax
import jax.numpy as jnp

from ladder_jax.nn import quantized
from ladder_jax.nn.modules import MLP, Attention, LayerContext, RMSNorm
from ladder_jax.nn.parameter import Module, Normal, Sizes, declare, zeros
from ladder_jax.nn.positions import Cache

TEMPERATURE = 0.1  # T


class SideBlock(Module):
    """The block beside one layer. sizes: of the model."""

    def __init__(self, sizes: Sizes):
        sizes = _side(sizes)
        self.config = sizes.config
        self.tap = declare("BD", sizes=sizes, init=_into(sizes))
        self.gate = declare("I", sizes=sizes, init=zeros)
        self.attention_norm, self.mlp_norm = RMSNorm(sizes), RMSNorm(sizes)
        self.attention, self.mlp = Attention(sizes), MLP(sizes)

    def __call__(
        self, h_BTD: jax.Array, tapped_BTM: jax.Array, cache: Cache | None, *, context: LayerContext
    ) -> tuple[jax.Array, Cache | None]:
        """h_l [B, T, D] from h_l-1 and x_l [B, T, M], and the block's cache. context: of the side network."""
        dtype, stream = jnp.dtype(self.config.dtype.value), h_BTD.dtype

        def attend(query, key, value):
            nonlocal cache
            attended, cache = context.positions.attend(query, key, value, cache=cache, kernel=context.kernel)
            return attended

        share = jax.nn.sigmoid(self.gate[...] / TEMPERATURE)[None, None]
        mapped = quantized.einsum("BTM,MD->BTD", tapped_BTM.astype(dtype), self.tap.get_value())
        h = (share * h_BTD.astype(jnp.float32) + (1 - share) * mapped.astype(jnp.float32)).astype(stream)
        with jax.named_scope("side_attention"):
            out = self.attention(self.attention_norm(h, dtype=dtype), attend=attend, table=context.table)
        h = h + out.astype(stream)
        with jax.named_scope("side_mlp"):
            return h + self.mlp(self.mlp_norm(h, dtype=dtype)).astype(stream), cache


class SideEnds(Module):
    """What the side network begins and ends with. sizes: of the model."""

    def __init__(self, sizes: Sizes):
        sizes = _side(sizes)
        self.down = declare("BD", sizes=sizes, init=_into(sizes))
        self.norm = RMSNorm(sizes)
        self.up = declare("DB", sizes=sizes, init=zeros)

    def begin(self, x_BTM: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        """h_0 [B, T, D] from the embedding x_0 [B, T, M], in its dtype."""
        down = quantized.einsum("BTM,MD->BTD", x_BTM.astype(dtype), self.down.get_value())
        return down.astype(x_BTM.dtype)

    def end(self, h_BTD: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
        """What the stream [B, T, M] gets of h_L [B, T, D]."""
        return quantized.einsum("BTD,DM->BTM", self.norm(h_BTD, dtype=dtype), self.up.get_value())


def _side(sizes: Sizes) -> Sizes:
    """Those of the side network, of a model's."""
    config = sizes.config
    return Sizes(config.side.network(config), stacked=sizes.stacked, layers=sizes.layers, backbone=config.d_model)


def _into(sizes: Sizes) -> Normal:
    """Of a projection of the model's stream, whose size is kept."""
    return Normal(1 / math.sqrt(sizes.backbone))
