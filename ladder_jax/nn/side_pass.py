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
from ladder_jax.residual import State, Step
from ladder_jax.residual.layers import Body, rematerialised


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
        self._block = rematerialised(self._compute, steps=(), remat=remat, loop=loop, axes=definition.layout.tensor)

    def begin(self, params: Params, state: State) -> State:
        """The state before the first layer, with h_0."""
        h = self._definition.bind("side", params["side"]).begin(lax.stop_gradient(state.residual), dtype=self._dtype)
        return dataclasses.replace(state, side=h)

    def around(
        self, advance: Body, state: State, layer: Params, cache: Cache | None, steps: tuple[Step, ...]
    ) -> tuple[State, Cache | None]:
        """What `advance` gives for a layer, and beside it h_l and the cache of its block."""
        h, of_block = state.side, cache and cache.side
        # An unrolled loop gives every array of a layer a gradient; here those of the layer itself are cut.
        frozen = {name: lax.stop_gradient(group) for name, group in layer.items() if name != "side"}
        state, cache = advance(state, {**frozen, "side": layer["side"]}, cache, steps)
        # As the stream and the newest sum of a State: then the policies and barriers of the layers' loop apply.
        mine = State(h, (lax.stop_gradient(state.residual),))
        mine, of_block = self._block(mine, layer["side"], of_block)
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
