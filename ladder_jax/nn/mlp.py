"""The feed-forward sublayer: SwiGLU (https://arxiv.org/abs/2002.05202)."""

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Biases
from ladder_jax.nn import bias, quantized
from ladder_jax.nn.parameter import Initializer, Normal, Sizes, declare, zeros


class MLP(nnx.Module):
    """silu(x gate) * (x up), then down. Under tensor parallelism F is split: down gives a partial sum."""

    def __init__(self, sizes: Sizes, *, out_init: Initializer):
        if sizes.fused:
            self.gate_up = declare("DG", sizes=sizes, init=Normal(0.02))
        else:
            self.gate = declare("DF", sizes=sizes, init=Normal(0.02))
            self.up = declare("DF", sizes=sizes, init=Normal(0.02))
        self.down = declare("FD", sizes=sizes, init=out_init)
        if sizes.config.biases is Biases.ALL:
            self.gate_bias = declare("F", sizes=sizes, init=zeros)
            self.up_bias = declare("F", sizes=sizes, init=zeros)
            self.down_bias = declare("D", sizes=sizes, init=zeros)

    def __call__(self, x_BTD: jax.Array, *, first_rank: jax.Array) -> jax.Array:
        """A rank's partial sum [B, T, D]; `first_rank` is True on the one rank that adds the output bias."""
        if hasattr(self, "gate_up"):
            gate, up = jnp.split(quantized.einsum("BTD,DG->BTG", x_BTD, self.gate_up.get_value()), 2, axis=-1)
        else:
            gate = quantized.einsum("BTD,DF->BTF", x_BTD, self.gate.get_value())
            up = quantized.einsum("BTD,DF->BTF", x_BTD, self.up.get_value())
        if hasattr(self, "gate_bias"):
            gate, up = bias.add(gate, self.gate_bias[...]), bias.add(up, self.up_bias[...])
        out = quantized.einsum("BTF,FD->BTD", jax.nn.silu(gate) * up, self.down.get_value())
        if hasattr(self, "down_bias"):
            out = bias.add(out, jnp.where(first_rank, self.down_bias[...], 0))
        return out
