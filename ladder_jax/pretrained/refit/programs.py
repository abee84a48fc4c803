"""A forward pass in programs of one sublayer each, and the statistics of a sublayer's late and whole inputs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn, residual
from ladder_jax.nn.layer import layer_context
from ladder_jax.nn.modules import normalise
from ladder_jax.parallel import all_reduce, on_mesh, over_ranks, pvary, rank
from ladder_jax.parallel.collectives import ranks
from ladder_jax.pretrained.sensitivity.programs import Streams, delayed_step, delays_of


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a model, on a mesh whose axes are data and tensor.

    begin(embedding's params, tokens [B, T]) -> Streams before the first sublayer
    advance[0], advance[1]: (layer's params, streams, delay) -> Streams after its attention, its MLP
    statistics(streams, target [B, T, D], delay, rows [B]) -> float32 (products, energy, missing)

    `products` [R, D, 2D] are n(z)^T [n(z), n(target)], summed over tokens, each row of the batch times its entry of
    `rows`. R is 1, or, where each rank has its own input (ladder-fresh), the number of ranks. `energy` is the sum of
    |n(target)|^2, and `missing` [R] that of |n(z) - n(target)|^2.
    """

    begin: Callable
    advance: tuple[Callable, Callable]
    statistics: Callable
    dims: Any  # of Streams


@functools.cache
def programs(definition: nn.ModelDef) -> Programs:
    config, axes, layout = definition.config, definition.layout.tensor, definition.layout
    dtype, fresh = jnp.dtype(config.dtype.value), any(residual.of_model(config).fresh)
    depth = 1 + max(delays_of(config))

    def begin(params, tokens):
        x = definition.bind("embedding", params).lookup(tokens, axes=axes, dtype=dtype)
        x = x.astype(config.residual_dtype.value)
        return Streams((x,) * depth, no_partial(x, width=config.d_model if fresh else 1))

    def no_partial(x, width):
        """Zeros; of width 1 where no sublayer reads its rank's own partial sum, which is then not carried."""
        return pvary(jnp.zeros((*x.shape[:2], width), dtype), (*layout.batch, *axes))

    def advance(sublayer, params, streams, delay):
        context = layer_context(config, streams.partial.shape[1], axes=axes, kernel=definition.kernel)
        step = delayed_step(config, sublayer, delay)
        layer = definition.bind("layers", params)
        after, _ = layer.advance(streams, None, steps=(step,), context=context)
        return after if fresh else dataclasses.replace(after, partial=streams.partial)

    def statistics(streams, target, delay, rows):
        late = lax.select_n(delay, *streams.newest_first)
        if fresh:
            late = residual.add(pvary(late, axes), (jnp.where(delay > 0, streams.partial, 0),))
        flat = lambda x: normalise(x, eps=config.norm_eps).reshape(-1, config.d_model)
        late, whole = pvary(flat(late), axes), pvary(flat(target), axes)
        weights = jnp.repeat(rows, target.shape[1])[:, None]
        both = weights * jnp.concatenate([late, whole], axis=1)
        energy = jnp.sum(weights * jnp.square(flat(target)))
        missing = jnp.sum(weights * jnp.square(late - whole))[None]
        if not fresh:  # each rank computes a share of the columns
            share = -(-both.shape[1] // ranks(axes))
            both = jnp.pad(both, ((0, 0), (0, share * ranks(axes) - both.shape[1])))
            both = lax.dynamic_slice_in_dim(both, rank(axes) * share, share, axis=1)
        products = jnp.einsum("td,te->de", late, both, precision=lax.Precision.HIGHEST)[None]
        return tuple(all_reduce(x, layout.batch) for x in (products, energy, missing))

    # Each rank has its own partial sum. It is declared as one array whose last dimension is split over the ranks.
    streams = Streams(("BTD",) * depth, "BTF")
    layer = jax.tree.map(lambda dims: dims.removeprefix("L"), definition.dims["layers"])

    def compiled(local, in_dims, out_dims):
        dims = dict(in_dims=in_dims, out_dims=out_dims)
        return jax.jit(on_mesh(over_ranks(local, layout=layout, **dims), layout=layout, **dims))

    return Programs(
        compiled(begin, (definition.dims["embedding"], "BT"), streams),
        tuple(compiled(functools.partial(advance, which), (layer, streams, ""), streams) for which in (0, 1)),
        # "F" is the dimension that the ranks split; "1" and "m" no mesh axis splits.
        compiled(statistics, (streams, "BTD", "", "B"), ("Fmm" if fresh else "1mF", "", "F")),
        streams,
    )
