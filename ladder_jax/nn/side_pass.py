"""What one rank computes with a side network (see side.py) beside a forward pass, and the network's caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ladder_jax.config import Loop, ModelConfig, Remat
from ladder_jax.nn import kernels
from ladder_jax.nn.model_def import ModelDef, Params
from ladder_jax.nn.parameter import Sizes
from ladder_jax.nn.positions import Cache, Positions, rotary_tables
from ladder_jax.nn.side import SideBlock
from ladder_jax.residual import State
from ladder_jax.residual.layers import rematerialised


class SidePass:
    """The side network of one forward pass over blocks of `length` tokens, on one rank; `State.side` is its stream."""

    def __init__(self, definition: ModelDef, length: int, *, positions: Positions, loop: Loop, remat: Remat):
        self._definition, self._dtype = definition, jnp.dtype(definition.config.dtype.value)
        config = network(definition)
        self._settings = dict(
            table=rotary_tables(positions.indices(length), config=config),
            kernel=kernel(definition),
            positions=positions,
        )
        self._block = rematerialised(self._compute, steps=(), remat=remat, loop=loop)

    def begin(self, params: Params, state: State) -> State:
        """The state before the first layer, with h_0."""
        h = self._definition.bind("side", params["side"]).begin(lax.stop_gradient(state.residual), dtype=self._dtype)
        return dataclasses.replace(state, side=h)

    def advance(
        self, h: jax.Array, params: Params, state: State, cache: Cache | None, of_block: Cache | None
    ) -> tuple[State, Cache | None]:
        """`state` and `cache`, those after a layer, with h_l and with the written cache of its block.

        h: h_l-1. params: of the block. of_block: its cache before.
        """
        # As the stream and the newest sum of a State: then the policies and barriers of the layers' loop apply.
        mine = State(h, (lax.stop_gradient(state.residual),))
        mine, of_block = self._block(mine, params, of_block)
        return dataclasses.replace(state, side=mine.residual), cache and dataclasses.replace(cache, side=of_block)

    def end(self, params: Params, x: jax.Array, state: State) -> jax.Array:
        """y of x_L, [B, T, M]."""
        ends = self._definition.bind("side", params["side"])
        return x + ends.end(state.side, dtype=self._dtype).astype(x.dtype)

    def _compute(self, state: State, params: Params, cache: Cache | None, steps: tuple) -> tuple[State, Cache | None]:
        block: SideBlock = nnx.merge(_graph(self._definition.config), params)
        h, cache = block(state.residual, state.sums[0], cache, **self._settings)
        return State(h), cache


def network(definition: ModelDef) -> ModelConfig:
    """The configuration of the side network's blocks."""
    return definition.config.side.network(definition.config)


def kernel(definition: ModelDef) -> kernels.Kernel:
    return kernels.choose(network(definition), mesh=definition.layout.mesh)


@functools.cache
def _graph(config: ModelConfig) -> nnx.GraphDef:
    return nnx.split(SideBlock(Sizes(config)))[0]
