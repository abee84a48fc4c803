"""One Transformer layer: two sublayers, (norm, attention) and (norm, MLP), wired by the topology's steps."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax.config import Launch, ModelConfig
from ladder_jax.nn import kernels
from ladder_jax.nn.attention import Attention
from ladder_jax.nn.mlp import MLP
from ladder_jax.nn.norm import RMSNorm
from ladder_jax.nn.parameter import Normal, Sizes
from ladder_jax.nn.positions import Cache, Positions
from ladder_jax.residual import State, Step, Topology


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What every layer of one forward pass shares: see Attention.__call__ for table, first_rank and positions."""

    axes: tuple[str, ...]
    dtype: jnp.dtype
    kernel: kernels.Kernel
    table: tuple[jax.Array, jax.Array]
    first_rank: jax.Array
    positions: Positions
    launch: Launch = Launch.CHAINED
    normalised: bool = False  # what the steps hand to a sublayer (see residual/sequence.py)


class Layer(nnx.Module):
    def __init__(self, sizes: Sizes, *, topology: Topology):
        config: ModelConfig = sizes.config
        # As in the paper: the residual stream's writers shrink with the number of writers.
        out_init = Normal(0.02 / math.sqrt(2 * config.num_layers))
        self.attention_norm = RMSNorm(sizes)
        self.attention = Attention(sizes, out_init=out_init)
        if not topology.shared_norm:
            self.mlp_norm = RMSNorm(sizes)
        self.mlp = MLP(sizes, out_init=out_init)

    def __call__(
        self, state: State, cache: Cache | None, *, steps: tuple[Step, ...], context: LayerContext
    ) -> tuple[State, Cache | None]:
        attention_norm, mlp_norm = self.attention_norm, getattr(self, "mlp_norm", self.attention_norm)
        if context.normalised:
            attention_norm, mlp_norm = attention_norm.gain, mlp_norm.gain

        def attention(x):
            nonlocal cache
            normed = attention_norm(x, dtype=context.dtype)
            partial, cache = self.attention(
                normed,
                table=context.table,
                kernel=context.kernel,
                first_rank=context.first_rank,
                positions=context.positions,
                cache=cache,
            )
            return partial

        def mlp(x):
            return self.mlp(mlp_norm(x, dtype=context.dtype), first_rank=context.first_rank)

        for step in steps:
            with jax.named_scope(
                "attention" if step.sublayers == (0,) else "mlp" if step.sublayers == (1,) else "joint"
            ):
                state = step(state, (attention, mlp), axes=context.axes, launch=context.launch)
        return state, cache
