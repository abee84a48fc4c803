"""A model whose ladder layers are chosen at run time: one compilation serves all subsets of its layers.

In a delayed topology, a sublayer reads the residual stream of some sublayers ago (see residual/). So the last few
streams are kept, and each sublayer's delay (0 in a standard layer) selects one of them. A program computes any range of
layers: subsets that agree in their first layers share the result of those.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn, residual
from ladder_jax.config import ModelConfig
from ladder_jax.nn.modules import LayerContext
from ladder_jax.nn.parameter import LAYERS, stacks
from ladder_jax.parallel import all_reduce, on_mesh, over_ranks, pvary
from ladder_jax.residual.topologies import ROUTED, SHARED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """The state between two sublayers. newest_first: x_i, x_{i-1}, ..., each [B, T, D]; x_0 replaces any before x_0.

    partial: the rank's own newest partial sum [B, T, D], which ladder-fresh reads.
    """

    newest_first: tuple[jax.Array, ...]
    partial: jax.Array


@dataclasses.dataclass(frozen=True)
class DelayedStep:
    """A step that reads the stream of `delay` sublayers ago. delay: a traced int32 scalar, so what is read, added and
    left pending cannot be planned, as residual/recurrence.py does it.

    early: sublayers of the same input whose output a later step does not leave out, if this step's input is late: a
        farskip's shared expert (residual/topologies.py).
    """

    sublayers: tuple[int, ...]
    delay: jax.Array
    fresh: bool
    early: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chosen(residual.AllReduce):
    """The wire of such steps: every sum is reduced at once."""

    def advance(self, state: Streams, step: DelayedStep, sublayers: Sequence[residual.Sublayer]) -> Streams:
        axes, late = self.axes, step.delay > 0
        x = pvary(lax.select_n(step.delay, *state.newest_first), axes)
        if step.fresh:
            x = residual.add(x, (jnp.where(late, state.partial, 0),))
        partial = self.partial(step.sublayers, x, sublayers)
        summed, before, depth = all_reduce(partial, axes), state.newest_first[0], len(state.newest_first)
        if step.early:
            early = all_reduce(self.partial(step.early, x, sublayers), axes)
            before = residual.add(before, (jnp.where(late, early, 0),))
            summed = summed + jnp.where(late, 0, early)
        newest = residual.add(before, (summed,))
        return Streams((newest, before, *state.newest_first[1:])[:depth], partial)


def delayed_step(config: ModelConfig, sublayer: int, delay: jax.Array, *, stack: str) -> DelayedStep:
    """The step of a layer's attention (0) or of its MLP or experts (1). stack: which holds the layer."""
    topology = residual.of_model(config)
    early = (SHARED,) if topology.farskip and sublayer == ROUTED and stack == LAYERS else ()
    return DelayedStep((sublayer,), delay, any(topology.fresh), early)


@dataclasses.dataclass(frozen=True)
class Programs:
    """begin(params, tokens [B, T]) -> Streams before the first layer
    advance[stack](params, streams, delays [L, 2], entries [L], start, stop) -> Streams after the stack's layers `start`
        to `stop` - 1; layer n has the parameters params[entries[n]]
    loss(params, streams, targets [B, T]) -> the summed loss in nats, from the Streams after the last layer
    """

    begin: Callable
    advance: Mapping[str, Callable]
    loss: Callable


def delays_of(config: ModelConfig) -> tuple[int, int]:
    """The delays of attention and MLP in a ladder layer of the kind `config.residual`, in sublayers."""
    return residual.topology(config.residual, num_layers=1).delays


@functools.cache
def programs(definition: nn.ModelDef) -> Programs:
    """The compiled programs of a ladder model, on a mesh whose only axis is tensor."""
    config, axes, layout = definition.config, definition.layout.tensor, definition.layout
    dtype, depth = jnp.dtype(config.dtype.value), 1 + max(delays_of(config))

    def begin(params, tokens):
        x = definition.bind("embedding", params["embedding"])(tokens, axes=axes)
        x = x.astype(config.residual_dtype.value)
        return Streams((x,) * depth, pvary(jnp.zeros(x.shape, dtype), (*layout.batch, *axes)))

    def advance(stack, params, streams, delays, entries, start, stop):
        length = streams.partial.shape[1]
        context = LayerContext.of(config, length, axes=axes, kernel=definition.kernel)

        def layer(index, streams):
            params_of_layer = jax.tree.map(
                lambda a: lax.dynamic_index_in_dim(a, entries[index], keepdims=False), params
            )
            steps = tuple(delayed_step(config, sublayer, delays[index, sublayer], stack=stack) for sublayer in (0, 1))
            module = definition.bind(stack, params_of_layer)
            return module(streams, steps=steps, wire=Chosen(axes), contexts=[context])[0]

        return lax.fori_loop(start, stop, layer, streams)

    def loss(params, streams, targets):
        x = pvary(streams.newest_first[0], axes)
        x = definition.bind("final_norm", params["final_norm"])(x, dtype=dtype)
        return all_reduce(nn.loss_sum(definition, params, x, targets), layout.batch)

    # Each rank has its own partial sum. It is declared as one array whose last dimension is split over the ranks.
    streams = Streams(("BTD",) * depth, "BTF")

    def compiled(local, in_dims, out_dims):
        dims = dict(in_dims=in_dims, out_dims=out_dims)
        return jax.jit(on_mesh(over_ranks(local, layout=layout, **dims), layout=layout, **dims))

    return Programs(
        compiled(begin, (definition.dims, "BT"), streams),
        {
            stack: compiled(
                functools.partial(advance, stack), (definition.dims[stack], streams, "", "", "", ""), streams
            )
            for stack in stacks(config)
        },
        compiled(loss, (definition.dims, streams, "BT"), ""),
    )
