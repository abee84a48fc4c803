"""A forward pass in programs of one sublayer each, and the statistics of a sublayer's late and whole inputs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn, residual
from ladder_jax.nn.modules import LayerContext, normalise
from ladder_jax.parallel import all_gather, all_reduce, on_mesh, over_ranks, pvary, rank
from ladder_jax.parallel.collectives import ranks
from ladder_jax.pretrained.sensitivity.programs import Chosen, Streams, delayed_step, delays_of
from ladder_jax.residual.recurrence import Projections, project


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a model, on a mesh whose axes are data and tensor.

    begin(embedding's params, tokens [B, T]) -> Streams before the first sublayer
    advance[0], advance[1]: (params of a layer of the stack, streams, delay) -> Streams after its attention, its MLP
    statistics(streams, target [B, T, D], delay, rows [B]) -> float32 (products, energy, missing)
    output[0], output[1]: (layer's params, streams, delay) -> the output of its attention, its MLP, [B, T, D]
    output_statistics[0], [1]: (layer's params, streams, goal [B, T, D], delay, rows [B]) -> as `statistics`

    `products` [R, D, 2D] are n(z)^T [n(z), n(target)], summed over tokens, each row of the batch times its entry of
    `rows`. R is 1, or, where each rank has its own input (ladder-fresh), the number of ranks. `energy` is the sum of
    |n(target)|^2, and `missing` [R] that of |n(z) - n(target)|^2.

    Of outputs, `products` [M, M + D] are h^T [h, goal - output], where h is the input of the output projection;
    `energy` is the sum of |goal|^2, and `missing` that of |goal - output|^2.
    """

    begin: Callable
    advance: tuple[Callable, Callable]
    statistics: Callable
    output: tuple[Callable, Callable]
    output_statistics: tuple[Callable, Callable]
    dims: Any  # of Streams


class OutputRead:
    """A wire from a sublayer's input [B, T, D], in place of a state, to one rank's (input of its output projection
    [B, T, M], output [B, T, D])."""

    def advance(
        self, x: jax.Array, step: residual.Step, sublayers: Sequence[residual.Normed]
    ) -> tuple[jax.Array, jax.Array]:
        read, (which,) = [], step.sublayers

        def out(product, hidden, weights):
            read.append(hidden)
            return product(hidden, weights)

        one = sublayers[which]
        output = one.function(one.norm(x, scale=one.gain), projections=Projections(out=project(out)))
        return read[0].reshape(*x.shape[:2], -1), output


@functools.cache
def programs(definition: nn.ModelDef, stack: str) -> Programs:
    """stack: the one that holds the layers (nn.parameter.STACKS)."""
    config, axes, layout = definition.config, definition.layout.tensor, definition.layout
    dtype, fresh = jnp.dtype(config.dtype.value), any(residual.of_model(config).fresh)
    depth = 1 + max(delays_of(config))

    def begin(params, tokens):
        x = definition.bind("embedding", params)(tokens, axes=axes)
        x = x.astype(config.residual_dtype.value)
        return Streams((x,) * depth, no_partial(x, width=config.d_model if fresh else 1))

    def no_partial(x, width):
        """Zeros; of width 1 where no sublayer reads its rank's own partial sum, which is then not carried."""
        return pvary(jnp.zeros((*x.shape[:2], width), dtype), (*layout.batch, *axes))

    def advance(sublayer, params, streams, delay):
        context = LayerContext.of(config, streams.partial.shape[1], axes=axes, kernel=definition.kernel)
        step = delayed_step(config, sublayer, delay, stack=stack)
        layer = definition.bind(stack, params)
        after, _ = layer(streams, steps=(step,), wire=Chosen(axes), contexts=[context])
        return after if fresh else dataclasses.replace(after, partial=streams.partial)

    def late_input(streams, delay):
        late = pvary(lax.select_n(delay, *streams.newest_first), axes)
        return residual.add(late, (jnp.where(delay > 0, streams.partial, 0),)) if fresh else late

    def statistics(streams, target, delay, rows):
        late = late_input(streams, delay)
        flat = lambda x: normalise(x, eps=config.norm_eps).reshape(-1, config.d_model)
        late, whole = flat(late), pvary(flat(target), axes)
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

    def read(sublayer, params, streams, delay):
        context = LayerContext.of(config, streams.partial.shape[1], axes=axes, kernel=definition.kernel)
        layer, steps = definition.bind(stack, params), (residual.Step((sublayer,)),)
        read_input = late_input(streams, delay)
        (hidden, partial), _ = layer(read_input, steps=steps, wire=OutputRead(), contexts=[context])
        return hidden, all_reduce(partial.astype(jnp.float32), axes)

    def output(sublayer, params, streams, delay):
        return read(sublayer, params, streams, delay)[1]

    def output_statistics(sublayer, params, streams, goal, delay, rows):
        hidden, reached = read(sublayer, params, streams, delay)
        flat = lambda x: x.astype(jnp.float32).reshape(-1, x.shape[-1])
        weights, goal, hidden = jnp.repeat(rows, goal.shape[1])[:, None], flat(goal), flat(hidden)
        lacking = goal - flat(reached)
        both = jnp.concatenate([all_gather(hidden, axes, dimension=1), pvary(lacking, axes)], axis=1)
        products = jnp.einsum("tm,te->me", weights * hidden, both, precision=lax.Precision.HIGHEST)
        energy, missing = (jnp.sum(weights * jnp.square(x)) for x in (goal, lacking))
        return tuple(all_reduce(x, layout.batch) for x in (products, energy, missing))

    # Each rank has its own partial sum. It is declared as one array whose last dimension is split over the ranks.
    streams = Streams(("BTD",) * depth, "BTF")
    layer = jax.tree.map(lambda dims: dims.removeprefix("L"), definition.dims[stack])

    def compiled(local, in_dims, out_dims):
        dims = dict(in_dims=in_dims, out_dims=out_dims)
        return jax.jit(on_mesh(over_ranks(local, layout=layout, **dims), layout=layout, **dims))

    return Programs(
        compiled(begin, (definition.dims["embedding"], "BT"), streams),
        tuple(compiled(functools.partial(advance, which), (layer, streams, ""), streams) for which in (0, 1)),
        # "F" is the dimension that the ranks split; "1" and "m" no mesh axis splits.
        compiled(statistics, (streams, "BTD", "", "B"), ("Fmm" if fresh else "1mF", "", "F")),
        tuple(compiled(functools.partial(output, which), (layer, streams, ""), "BTD") for which in (0, 1)),
        tuple(
            compiled(functools.partial(output_statistics, which), (layer, streams, "BTD", "", "B"), ("Fm", "", ""))
            for which in (0, 1)
        ),
        streams,
    )
