"""One Transformer layer: two sublayers, (norm, attention) and (norm, MLP), wired by the topology's steps."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ladder_jax import residual
from ladder_jax.config import Launch, ModelConfig, QKNorm
from ladder_jax.nn import kernels
from ladder_jax.nn.modules import MLP, Attention, RMSNorm
from ladder_jax.nn.parameter import Module, Sizes, sizes_of
from ladder_jax.nn.positions import FULL_SEQUENCE, Cache, Positions, rotary_tables
from ladder_jax.parallel import rank
from ladder_jax.residual import Normed, State, Step
from ladder_jax.residual.sequence import LOCAL


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """What every layer of one forward pass shares: see Attention.with_cache for table, first_rank and positions."""

    axes: tuple[str, ...]
    dtype: jnp.dtype
    kernel: kernels.Kernel
    table: tuple[jax.Array, jax.Array]
    first_rank: jax.Array
    positions: Positions
    launch: Launch = Launch.CHAINED
    normalised: bool = False  # what the steps hand to a sublayer (see residual/sequence.py)
    exchanges: bool = False  # the ranks exchange the rows of experts (see residual/exchange.py)


def layer_context(
    config: ModelConfig,
    length: int,
    *,
    axes: tuple[str, ...],
    kernel: kernels.Kernel = kernels.Kernel.XLA,
    positions: Positions = FULL_SEQUENCE,
    launch: Launch = Launch.CHAINED,
    normalised: bool = False,
    exchanges: bool = False,
) -> LayerContext:
    """For blocks of `length` tokens, on one rank of `axes`."""
    table, first_rank = rotary_tables(positions.indices(length), config=config), rank(axes) == 0
    of_pass = positions, launch, normalised, exchanges
    return LayerContext(axes, jnp.dtype(config.dtype.value), kernel, table, first_rank, *of_pass)


class Layer(Module):
    """`Layer(config, rngs=nnx.Rngs(0))(x)` on one device; inside `jax.shard_map` with the `axes` of its ranks."""

    def __init__(self, config: ModelConfig | Sizes, *, rngs: nnx.Rngs | None = None):
        sizes = sizes_of(config)
        self.config = sizes.config
        self.attention_norm = RMSNorm(sizes, rngs=rngs)
        self.attention = Attention(sizes, rngs=rngs)
        if not residual.of_model(sizes.config).shared_norm:
            self.mlp_norm = RMSNorm(sizes, rngs=rngs)
        if sizes.config.moe is None:
            self.mlp = MLP(sizes, rngs=rngs)
        else:
            from ladder_jax.nn.experts import MoE

            self.mlp = MoE(sizes, rngs=rngs)
        if sizes.config.side is not None:
            from ladder_jax.nn.side import SideBlock

            self.side = SideBlock(sizes)  # computed beside the layer, by nn/side_pass.py

    def __call__(self, x_BTD: jax.Array, *, axes: tuple[str, ...] = ()) -> jax.Array:
        """The stream [B, T, D] of a model with only this layer, by the steps of its topology's first layer.

        Equal on all ranks of `axes`, as `x_BTD` must be.
        """
        topology = residual.of_model(self.config)
        state = residual.begin(x_BTD, topology=topology, axes=axes)
        context = layer_context(self.config, x_BTD.shape[1], axes=axes)
        state, _ = self.advance(state, None, steps=topology.layers[0], context=context)
        return residual.flush(state, axes=axes)

    def advance(
        self, state: State, cache: Cache | None, *, steps: tuple[Step, ...], context: LayerContext
    ) -> tuple[State, Cache | None]:
        """The state after this layer's `steps`, and its cache with the block's keys and values."""
        norms = self.attention_norm, getattr(self, "mlp_norm", self.attention_norm)
        attention_norm, mlp_norm = (norm.gain for norm in norms) if context.normalised else norms

        def attention(x, gain, projections=LOCAL):
            nonlocal cache
            partial, cache = self.attention.with_cache(
                attention_norm(x, dtype=context.dtype, scale=gain),
                cache,
                table=context.table,
                kernel=context.kernel,
                first_rank=context.first_rank,
                positions=context.positions,
                projections=projections,
                axes=context.axes,
            )
            return partial

        def mlp(x, gain, projections=LOCAL):
            normed = mlp_norm(x, dtype=context.dtype, scale=gain)
            return self.mlp(normed, first_rank=context.first_rank, projections=projections)

        functions, of_layer = (attention, mlp), []  # the statistics of this layer's router
        routing = getattr(state, "routing", None)  # of all layers; only a training step has them
        if self.config.moe is not None:
            functions = attention, *self._experts(mlp_norm, context, None if routing is None else of_layer.append)
        gains = (norm.scale[...] for norm in (*norms, norms[1]))  # farskip has two sublayers behind the second norm
        sublayers = [Normed(function, gain) for function, gain in zip(functions, gains)]
        if context.exchanges:
            from ladder_jax.nn import exchanged

            on_routing = None if routing is None else of_layer.append
            gained = functools.partial(mlp_norm, dtype=context.dtype)
            settings = dict(axes=context.axes, on_routing=on_routing, ends_B=context.positions.ends)
            sublayers[1:] = exchanged.sublayers(self.mlp, gained, **settings)
        for step in steps:
            scope = "attention" if step.sublayers == (0,) else "joint" if 0 in step.sublayers else "mlp"
            with jax.named_scope(scope):
                state = step(state, sublayers, axes=context.axes, launch=self._launch(step, context))
        if routing is not None:
            state = dataclasses.replace(state, routing=routing.with_layer(*of_layer) if of_layer else routing)
        return state, cache

    def _launch(self, step: Step, context: LayerContext) -> Launch:
        """Compilers fail where attention's norms communicate while a started all-reduce is awaited after it."""
        communicates = self.config.qk_norm is QKNorm.ALL and 0 in step.sublayers
        return Launch.CHAINED if communicates else context.launch

    def _experts(
        self, norm: Callable, context: LayerContext, on_routing: Callable | None
    ) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], ...]:
        """Functions of the input and its norm's gain: all experts, or (of farskip) the routed and the shared ones."""
        settings = dict(axes=context.axes, on_routing=on_routing)
        normed = lambda x, gain: norm(x, dtype=context.dtype, scale=gain)
        routed = lambda x, gain: self.mlp.routed(normed(x, gain), **settings)
        shared = lambda x, gain: self.mlp.shared(normed(x, gain))
        if residual.of_model(self.config).farskip:
            return routed, shared
        return (lambda x, gain: self.mlp(normed(x, gain), **settings),)
