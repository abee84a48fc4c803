"""A model whose ladder layers are chosen at run time: one compilation for all subsets of its layers.

Every delayed topology reads a stream of some sublayers ago (see residual/). So the last few streams are kept, and
each sublayer's delay, zero in a standard layer, says which of them it reads. Layers are computed from any layer to any
other: subsets that begin alike share what comes before their first difference.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn, residual
from ladder_jax.config import ModelConfig
from ladder_jax.nn.layer import layer_context
from ladder_jax.parallel import all_reduce, on_mesh, over_ranks, pvary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """Between two sublayers: x_i, x_{i-1}, ..., each [B, T, D], of which those before x_0 are x_0; and each rank's
    own newest output, [B, T, D], which a fresh ladder reads.
    """

    newest_first: tuple[jax.Array, ...]
    partial: jax.Array


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A step that reads the stream of `delay` sublayers ago; `delay` is an int32 scalar of the running program."""

    sublayers: tuple[int, ...]
    delay: jax.Array
    fresh: bool

    def __call__(self, state: Streams, sublayers: Sequence[residual.Sublayer], *, axes: tuple[str, ...], **_):
        entered = pvary(lax.select_n(self.delay, *state.newest_first), axes)
        if self.fresh:
            entered = residual.add(entered, (jnp.where(self.delay > 0, state.partial, 0),))
        partial = residual.compute(entered, self.sublayers, sublayers, axes=axes)
        newest = residual.add(state.newest_first[0], (all_reduce(partial, axes),))
        return Streams((newest, *state.newest_first[:-1]), partial)


@dataclasses.dataclass(frozen=True)
class Programs:
    """begin(params, tokens [B, T]) -> Streams before the first layer
    advance(params, streams, delays [L, 2], start, stop) -> Streams, after the layers from `start` to before `stop`
    loss(params, streams, targets [B, T]) -> the summed loss in nats, of Streams after the last layer
    """

    begin: Callable
    advance: Callable
    loss: Callable


def delays_of(config: ModelConfig) -> tuple[int, int]:
    """Those of a ladder layer's attention and MLP, in sublayers, of the kind that `config.residual` names."""
    return residual.topology(config.residual, num_layers=1).delays


@functools.cache
def programs(definition: nn.ModelDef) -> Programs:
    """For a ladder kind of model, on any mesh whose only axis is tensor."""
    config, axes, layout = definition.config, definition.layout.tensor, definition.layout
    dtype, fresh = jnp.dtype(config.dtype.value), residual.of_model(config).fresh[0]
    depth = 1 + max(delays_of(config))

    def begin(params, tokens):
        x = definition.bind("embedding", params["embedding"]).lookup(tokens, axes=axes, dtype=dtype)
        x = x.astype(config.residual_dtype.value)
        return Streams((x,) * depth, pvary(jnp.zeros(x.shape, dtype), (*layout.batch, *axes)))

    def advance(params, streams, delays, start, stop):
        length = streams.partial.shape[1]
        context = layer_context(config, length, axes=axes, kernel=definition.kernel)

        def layer(index, streams):
            params_of_layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), params)
            steps = tuple(Chosen((which,), delays[index, which], fresh) for which in (0, 1))
            return definition.bind("layers", params_of_layer).advance(streams, None, steps=steps, context=context)[0]

        return lax.fori_loop(start, stop, layer, streams)

    def loss(params, streams, targets):
        x = pvary(streams.newest_first[0], axes)
        x = definition.bind("final_norm", params["final_norm"])(x, dtype=dtype)
        return all_reduce(nn.loss_sum(definition, params, x, targets), layout.batch)

    # A rank's own output is stored as if it were one dimension that tensor parallelism splits.
    streams = Streams(("BTD",) * depth, "BTF")

    def compiled(local, in_dims, out_dims):
        dims = dict(in_dims=in_dims, out_dims=out_dims)
        return jax.jit(on_mesh(over_ranks(local, layout=layout, **dims), layout=layout, **dims))

    return Programs(
        compiled(begin, (definition.dims, "BT"), streams),
        compiled(advance, (definition.dims["layers"], streams, "", "", ""), streams),
        compiled(loss, (definition.dims, streams, "BT"), ""),
    )
