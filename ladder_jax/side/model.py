"""A side network: ladder side-tuning (arXiv 2206.06522). It trains, and the model that it stands
beside is frozen.

    h_0 = D x_0                                             the embedding, projected down
    h   = mu_l h_l-1 + (1 - mu_l) W_l x_l                   mu_l = sigmoid(alpha_l / T), T = 0.1, alpha_l = 0 at first
    h_l = h + attention(norm(h)),  then  h_l + MLP(norm(h_l))
    y   = x_L + U norm(h_L)                                 before the model's final norm and head

x_l is the residual stream after layer l as it stands: of a ladder's layer without the outputs that
are still pending. U is zero at first, so that the model's function is unchanged. Block l runs in
the loop body of layer l. No gradient passes a tap (W_l x_l), so that nothing of the model is kept
for the backward pass but the taps' streams.

Every rank holds the whole network and computes the same with it, on streams that are equal on all
tensor ranks: it communicates nothing. The small letters of its dimensions say so: d, n, k, h, f as
D, N, K, H, F of the model; b is the model's width, i one number.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh

from ladder_jax.config import SCANNED, Execution, ExpertParallelism, ModelConfig, Remat
from ladder_jax.config.fields import check
from ladder_jax.nn import (
    Cache,
    ForwardPass,
    Layer,
    ModelDef,
    RMSNorm,
    attention,
    define as define_plain,
    forward_pass,
    quantized,
)
from ladder_jax.nn.attention import FULL_SEQUENCE, Positions
from ladder_jax.nn.modules import LayerContext
from ladder_jax.nn.parameter import LAYERS, Module, Normal, Sizes, zeros
from ladder_jax.parallel import NamedMesh
from ladder_jax.residual import State
from ladder_jax.residual.loop import rematerialised

SIDE = "side"
"""The name of the network's parameters: of its ends beside the model's modules, of its blocks
beside a layer's.
"""
TEMPERATURE = 0.1  # T


def define(
    config: ModelConfig,
    *,
    mesh: Mesh | NamedMesh,
    experts: ExpertParallelism | str = ExpertParallelism.REDUCE,
) -> "SideModel":
    """As `nn.define`, of a model with a side network (`config.side`). Raises UserError for one
    without.
    """
    check(config.side is not None, "a model without model.side is defined by ladder_jax.nn")
    plain = define_plain(dataclasses.replace(config, side=None), mesh=mesh, experts=experts)
    return SideModel(config, plain.layout, plain.experts)


@dataclasses.dataclass(frozen=True)
class SideModel(ModelDef):
    """A model and the side network beside it."""

    sections: ClassVar[tuple[str, ...]] = (*ModelDef.sections, SIDE)

    @functools.cached_property
    def network(self) -> ModelConfig:
        """The configuration of the side network's blocks."""
        return self.config.side.network(self.config)

    @functools.cached_property
    def network_kernel(self) -> attention.Kernel:
        return attention.choose(self.network, mesh=self.layout.mesh)

    @functools.cached_property
    def network_graph(self) -> nnx.GraphDef:
        """Of one block."""
        return nnx.split(SideBlock(SideSizes.beside(self.config)))[0]

    def without_side(self) -> ModelDef:
        """The model alone."""
        return ModelDef(dataclasses.replace(self.config, side=None), self.layout, self.experts)

    def declare(self):
        modules = super().declare()
        modules[SIDE] = SideEnds(SideSizes.beside(self.config))
        of_layers = SideSizes.beside(self.config, layers=self.config.num_layers)
        setattr(modules[LAYERS], SIDE, SideBlock(of_layers))
        return modules

    def cache(self, array):
        dims = self.network_kernel.cache_dims.replace("N", "n")
        of_block = functools.partial(array, self.network, self.network_kernel, dims)
        return SideCache(super().cache(array), Cache(of_block(), of_block()))

    def check(self, execution, *, rows):
        whole = "a side network (model.side), which reads whole streams"
        check(not self.splits(execution), f"sequence_parallel is not for a model with {whole}")
        check(execution.interleave == 1, f"interleave 2 is not for a model with {whole}")
        super().check(execution, rows=rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SideCache:
    """The caches of one layer and of the block beside it."""

    layer: Cache
    block: Cache


@dataclasses.dataclass(frozen=True)
class SideSizes(Sizes):
    """Of the network's parameters, whose letters are small. backbone: B, the width of the model
    beside it.
    """

    backbone: int = 0

    @classmethod
    def beside(cls, config: ModelConfig, *, layers: int | None = None) -> "SideSizes":
        return cls(config.side.network(config), layers=layers, backbone=config.d_model)

    def __getitem__(self, dim):
        own = {"B": self.backbone, "I": 1}
        return own[dim] if dim in own else super().__getitem__(dim)

    def stored(self, dims):
        return super().stored(dims.lower())


class SideBlock(Layer):
    """The block beside one layer."""

    def __init__(self, sizes: SideSizes):
        super().__init__(sizes)
        self.tap = sizes.declare("BD", init=_of_model(sizes))
        self.gate = sizes.declare("I", init=zeros)

    def __call__(
        self, h_BTD: Array, tapped_BTM: Array, cache: Cache | None, *, context: LayerContext
    ) -> tuple[Array, Cache | None]:
        """h_l [B, T, D] from h_l-1 and x_l [B, T, M], and the block's cache. context: of the side
        network.
        """
        dtype = context.dtype
        stream = h_BTD.dtype

        def attend(query, key, value):
            nonlocal cache
            attended, cache = context.positions.attend(
                query, key, value, cache=cache, kernel=context.kernel
            )
            return attended

        share = jax.nn.sigmoid(self.gate[...] / TEMPERATURE)[None, None]
        mapped = quantized.einsum("BTM,MD->BTD", tapped_BTM.astype(dtype), self.tap.get_value())
        h = share * h_BTD.astype(jnp.float32) + (1 - share) * mapped.astype(jnp.float32)
        h = h.astype(stream)
        with jax.named_scope("side_attention"):
            out = self.attention(
                self.attention_norm(h, dtype=dtype), attend=attend, table=context.table
            )
        h = h + out.astype(stream)
        with jax.named_scope("side_mlp"):
            return h + self.mlp(self.mlp_norm(h, dtype=dtype)).astype(stream), cache


class SideEnds(Module):
    """What the side network begins and ends with."""

    def __init__(self, sizes: SideSizes):
        self.down = sizes.declare("BD", init=_of_model(sizes))
        self.norm = RMSNorm(sizes)
        self.up = sizes.declare("DB", init=zeros)

    def begin(self, x_BTM: Array, *, dtype: jnp.dtype) -> Array:
        """h_0 [B, T, D] from the embedding x_0 [B, T, M], in its dtype."""
        down = quantized.einsum("BTM,MD->BTD", x_BTM.astype(dtype), self.down.get_value())
        return down.astype(x_BTM.dtype)

    def end(self, h_BTD: Array, *, dtype: jnp.dtype) -> Array:
        """What the stream [B, T, M] gets of h_L [B, T, D]."""
        return quantized.einsum("BTD,DM->BTM", self.norm(h_BTD, dtype=dtype), self.up.get_value())


class SidePass(ForwardPass):
    """A forward pass with the side network beside it, whose stream is `extra`."""

    definition: SideModel

    def __init__(
        self,
        definition: SideModel,
        shape: tuple[int, int],
        *,
        execution: Execution = SCANNED,
        positions: Positions = FULL_SEQUENCE,
    ):
        # only the side network has a backward pass
        frozen = dataclasses.replace(execution, remat=Remat.NONE)
        super().__init__(definition, shape, execution=frozen, positions=positions)
        self._context = LayerContext(
            definition.network,
            shape[1],
            axes=(),
            kernel=definition.network_kernel,
            positions=positions,
        )
        self._block = rematerialised(
            self._compute, steps=(), remat=execution.remat, loop=execution.loop, axes=self.wire.axes
        )

    def embed(self, params, tokens):
        """The state before the first layer, and h_0."""
        state, _ = super().embed(params, tokens)
        ends = self.definition.bind(SIDE, params[SIDE])
        return state, ends.begin(lax.stop_gradient(state.residual), dtype=self.definition.dtype)

    def layer(self, state, extra, params, cache, **settings):
        """What a layer gives without it, and beside it h_l and the cache of its block."""
        of_layer, of_block = (None, None) if cache is None else (cache.layer, cache.block)
        # An unrolled loop gives every array of a layer a gradient; here those of the layer itself
        # are cut.
        frozen = {name: lax.stop_gradient(group) for name, group in params.items() if name != SIDE}
        frozen[SIDE] = params[SIDE]
        state, _, of_layer = super().layer(state, None, frozen, of_layer, **settings)
        # As the stream and the newest sum of a State: then the policies and barriers of the layers'
        # loop apply.
        mine = State(extra, (lax.stop_gradient(state.residual),))
        mine, _, of_block = self._block(mine, None, params[SIDE], of_block)
        return state, mine.residual, None if cache is None else SideCache(of_layer, of_block)

    def finish(self, params, state, extra):
        """The final, normed stream of y, [B, T, M]."""
        x = self.wire.flush(state)
        ends = self.definition.bind(SIDE, params[SIDE])
        added = ends.end(extra, dtype=self.definition.dtype)
        return self.normed(params, x + added.astype(x.dtype))

    def _compute(self, state, extra, params, cache, steps):
        block: SideBlock = nnx.merge(self.definition.network_graph, params)
        h, cache = block(state.residual, state.sums[0], cache, context=self._context)
        return State(h), None, cache


forward_pass.register(SideModel, SidePass)


def _of_model(sizes):
    """Of a projection of the model's stream, whose size is kept."""
    return Normal(1 / math.sqrt(sizes.backbone))
