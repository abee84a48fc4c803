"""The feed-forward sublayer: SwiGLU (https://arxiv.org/abs/2002.05202)."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Biases, ModelConfig
from ladder_jax.nn import bias, quantized
from ladder_jax.nn.parameter import Normal, Sizes, declare, residual_writer, sizes_of, zeros


class MLP(nnx.Module):
    """silu(x gate) * (x up), then down. Under tensor parallelism F is split: down gives a partial sum.

    `MLP(config, rngs=nnx.Rngs(0))(x)` is the whole sublayer on one device. Inside `jax.shard_map`, over a rank's shards
    of its arrays (`nn.partition_specs`), it is this rank's partial sum.
    """

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config)
        new = functools.partial(declare, sizes=sizes, rngs=rngs)
        if sizes.fused:
            self.gate_up = new("DG", init=Normal(0.02))
        else:
            self.gate = new("DF", init=Normal(0.02))
            self.up = new("DF", init=Normal(0.02))
        self.down = new("FD", init=residual_writer(sizes.config))
        if sizes.config.biases is Biases.ALL:
            self.gate_bias = new("F", init=zeros)
            self.up_bias = new("F", init=zeros)
            self.down_bias = new("D", init=zeros)

    def __call__(self, x_BTD: jax.Array, *, first_rank: jax.Array | bool = True) -> jax.Array:
        """A rank's partial sum [B, T, D]. first_rank: True on the one rank that adds the output bias."""
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
