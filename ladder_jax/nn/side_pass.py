"""What one rank computes with a side network (see side.py) beside a forward pass, and the network's caches."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ladder_jax.config import SCANNED, Execution, ModelConfig, Remat
from ladder_jax.config.fields import check
from ladder_jax.nn import kernels
from ladder_jax.nn.forward import ForwardPass
from ladder_jax.nn.model_def import ModelDef, Params
from ladder_jax.nn.modules import LayerContext
from ladder_jax.nn.parameter import Sizes
from ladder_jax.nn.positions import FULL_SEQUENCE, Cache, Positions
from ladder_jax.nn.side import SideBlock
from ladder_jax.residual import State
from ladder_jax.residual.loop import rematerialised


class SidePass(ForwardPass):
    """A forward pass with the side network beside it, whose stream is `extra`."""

    def __init__(
        self,
        definition: ModelDef,
        shape: tuple[int, int],
        *,
        execution: Execution = SCANNED,
        positions: Positions = FULL_SEQUENCE,
    ):
        check(not definition.splits(execution), "model.side reads whole streams: not with sequence_parallel")
        frozen = dataclasses.replace(execution, remat=Remat.NONE)  # only the side network has a backward pass
        super().__init__(definition, shape, execution=frozen, positions=positions)
        self._dtype = jnp.dtype(definition.config.dtype.value)
        self._side = LayerContext.of(
            network(definition), shape[1], axes=(), kernel=kernel(definition), positions=positions
        )
        of_block = dict(steps=(), remat=execution.remat, loop=execution.loop, axes=self.wire.axes)
        self._block = rematerialised(self._compute, **of_block)

    def embed(self, params: Params, tokens: jax.Array) -> tuple[State, jax.Array]:
        """The state before the first layer, and h_0."""
        state, _ = super().embed(params, tokens)
        ends = self.definition.bind("side", params["side"])
        return state, ends.begin(lax.stop_gradient(state.residual), dtype=self._dtype)

    def layer(
        self, state: State, extra: jax.Array, params: Params, cache: Cache | None, **settings: Any
    ) -> tuple[State, jax.Array, Cache | None]:
        """What a layer gives without it, and beside it h_l and the cache of its block."""
        of_block = cache and cache.side
        # An unrolled loop gives every array of a layer a gradient; here those of the layer itself are cut.
        frozen = {name: lax.stop_gradient(group) for name, group in params.items() if name != "side"}
        state, _, cache = super().layer(state, None, {**frozen, "side": params["side"]}, cache, **settings)
        # As the stream and the newest sum of a State: then the policies and barriers of the layers' loop apply.
        mine = State(extra, (lax.stop_gradient(state.residual),))
        mine, _, of_block = self._block(mine, None, params["side"], of_block)
        return state, mine.residual, cache and dataclasses.replace(cache, side=of_block)

    def finish(self, params: Params, state: State, extra: jax.Array) -> jax.Array:
        """The final, normed stream of y, [B, T, M]."""
        x, ends = self.stream(state), self.definition.bind("side", params["side"])
        return self._normed(params, x + ends.end(extra, dtype=self._dtype).astype(x.dtype))

    def _compute(
        self, state: State, extra: None, params: Params, cache: Cache | None, steps: tuple
    ) -> tuple[State, None, Cache | None]:
        block: SideBlock = nnx.merge(_graph(self.definition.config), params)
        h, cache = block(state.residual, state.sums[0], cache, context=self._side)
        return State(h), None, cache


def network(definition: ModelDef) -> ModelConfig:
    """The configuration of the side network's blocks."""
    return definition.config.side.network(definition.config)


def kernel(definition: ModelDef) -> kernels.Kernel:
    return kernels.choose(network(definition), mesh=definition.layout.mesh)


@functools.cache
def _graph(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(SideBlock(Sizes(config)))[0]
