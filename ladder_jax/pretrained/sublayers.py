"""A model's forward pass in programs of one sublayer each, whose delays are values at run time.

So one compilation serves every subset of converted layers. In a delayed topology, a sublayer reads
the residual stream of some sublayers ago (see residual/). So the last few streams are kept, and
each sublayer's delay (0 in a standard layer) selects one of them. `sensitivity` and `refit` run
these programs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax import nn, residual
from ladder_jax.config import ModelConfig
from ladder_jax.decode import steps
from ladder_jax.nn.modules import LayerContext, normalise
from ladder_jax.nn.parameter import LAYERS, pad_end, stacks
from ladder_jax.parallel import all_gather, all_reduce, cache_programs, pvary, rank
from ladder_jax.parallel.collectives import ranks
from ladder_jax.residual.recurrence import Projections
from ladder_jax.residual.topologies import ROUTED, SHARED

ROWS = 4  # of a batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """The state between two sublayers. newest_first: x_i, x_{i-1}, ..., each [B, T, D]; x_0
    replaces any before x_0.

    partial: the rank's own newest partial sum [B, T, D], which ladder-fresh reads; for other
    topologies [B, T, 1] of zeros.
    """

    newest_first: tuple[jax.Array, ...]
    partial: jax.Array

    def input(self, step: residual.Step, *, axes: tuple[str, ...]) -> jax.Array:
        """The stream of `step.delay` sublayers ago. That is a traced int32 scalar, so what is read,
        added and left pending cannot be planned, as residual/recurrence.py does it.
        """
        x = pvary(lax.select_n(step.delay, *self.newest_first), axes)
        if not step.fresh:
            return x
        own = jnp.where(step.delay > 0, self.partial, 0)
        return residual.add(x, (own,))


@dataclasses.dataclass(frozen=True)
class Chosen(residual.AllReduce):
    """The wire of steps with such delays: every sum is reduced at once.

    A step's early sublayers are those of the same input whose output a later step does not leave
    out, if its own input is late: a farskip's shared expert (residual/topologies.py).
    """

    def advance(
        self, state: Streams, step: residual.Step, sublayers: Sequence[residual.Sublayer]
    ) -> Streams:
        x = state.input(step, axes=self.axes)
        late = step.delay > 0
        partial = self.partial(step.sublayers, x, sublayers)
        summed = all_reduce(partial, self.axes)
        streams = state.newest_first
        before = streams[0]
        if step.early:
            early = self.partial(step.early, x, sublayers)
            early = all_reduce(early, self.axes)
            before = residual.add(before, (jnp.where(late, early, 0),))
            summed = summed + jnp.where(late, 0, early)
        newest = residual.add(before, (summed,))
        kept = (newest, before, *streams[1:])
        if not step.fresh:
            partial = state.partial
        return Streams(kept[: len(streams)], partial)


@dataclasses.dataclass(frozen=True)
class OutputRead:
    """A wire from `Streams` to one rank's (input of the output projection [B, T, M], output
    [B, T, D]).
    """

    axes: tuple[str, ...]

    def advance(
        self, state: Streams, step: residual.Step, sublayers: Sequence[residual.Normed]
    ) -> tuple[jax.Array, jax.Array]:
        read = []
        (which,) = step.sublayers

        def out(product, hidden, weights):
            read.append(hidden)
            return product(hidden, weights)

        one = sublayers[which]
        x = one.normed(state.input(step, axes=self.axes))
        projections = Projections(out=out)
        output = one.function(x, projections=projections)
        return read[0].reshape(*x.shape[:2], -1), output


Two = tuple[Callable, Callable]  # of attention, and of the MLP or experts


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a model, on a mesh whose axes are data and tensor.

    begin(embedding's params, tokens [B, T]) -> Streams before the first sublayer
    advance[stack]: (params of a layer of the stack, streams, delay) -> Streams after its attention,
        its MLP
    loss(params outside the layers, streams, targets [B, T]) -> the summed loss in nats, after the
        last layer
    statistics(streams, delay) -> float32 (products, energy, missing), sums over tokens
    output_statistics[stack]: (layer's params, its original ones, streams, delay) -> likewise

    Of inputs, with z the late input, x the whole one and n the norm without its gain, `products`
    [R, D, 2D] are n(z)^T [n(z), n(x) - n(z)], `energy` is the sum of |n(x)|^2, and `missing`
    [ranks] that of |n(x) - n(z)|^2. R is 1, and D is padded to a multiple of the ranks; or, where
    each rank has its own input (ladder-fresh), R is the number of ranks.

    Of outputs, `products` [1, M, M + D] are h^T [h, goal - output], where h is the input of the
    output projection, and the goal what the original layer's output is of x; `energy` is the sum
    of |goal|^2, and `missing` [ranks] that of |goal - output|^2.
    """

    begin: Callable
    advance: Mapping[str, Two]
    loss: Callable
    statistics: Callable
    output_statistics: Mapping[str, Two]
    dims: Any  # of Streams


def batches(rows: np.ndarray, *, multiple: int = 1) -> list[np.ndarray]:
    """The rows in batches of ROWS, rounded up to a multiple, and one of the rest."""
    size = -(-ROWS // multiple) * multiple
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def delays(config: ModelConfig) -> np.ndarray:
    """[L, 2], in sublayers, of each layer's attention and MLP."""
    return np.array(residual.of_model(config).delays, np.int32).reshape(-1, 2)


@cache_programs
def programs(definition: nn.ModelDef) -> Programs:
    config = definition.config
    layout = definition.layout
    axes = layout.tensor
    width = config.d_model
    topology = residual.of_model(config)
    dtype = definition.dtype
    fresh = any(topology.fresh)
    # of a converted layer, if there is any
    converted = residual.topology(config.residual, num_layers=1)
    depth = 1 + max(converted.delays)

    def begin(params, tokens):
        embed = definition.bind("embedding", params)
        x = embed(tokens, axes=axes)
        x = x.astype(config.residual_dtype.value)
        last = width if fresh else 1
        partial = jnp.zeros((*x.shape[:2], last), dtype)
        partial = pvary(partial, (*layout.batch, *axes))
        return Streams((x,) * depth, partial)

    def through(wire, stack, sublayer, params, streams, delay):
        """A sublayer of a layer with `params`, over `wire`."""
        context = LayerContext(
            config, streams.partial.shape[1], axes=axes, kernel=definition.kernel
        )
        early = ()
        if topology.farskip and sublayer == ROUTED and stack == LAYERS:
            early = (SHARED,)
        step = residual.Step((sublayer,), delay=delay, fresh=fresh, early=early)
        layer = definition.bind(stack, params)
        streams, *_ = layer(streams, steps=(step,), wire=wire, contexts=[context])
        return streams

    def advance(*about):
        return through(Chosen(axes), *about)

    def loss(params, streams, targets):
        x = pvary(streams.newest_first[0], axes)
        x = definition.bind("final_norm", params["final_norm"])(x, dtype=dtype)
        return all_reduce(nn.loss_sum(definition, params, x, targets), layout.batch)

    def normed(x):
        return normalise(x, eps=config.norm_eps).reshape(-1, width)

    def statistics(streams, delay):
        step = residual.Step((), delay=delay, fresh=fresh)
        late = normed(streams.input(step, axes=axes))
        whole = normed(streams.newest_first[0])
        read = late
        if not fresh:  # each rank computes a share of the products
            count = ranks(axes)
            share = -(-width // count)
            read = pad_end(late, axis=1, by=share * count - width)
            start = rank(axes) * share
            read = lax.dynamic_slice_in_dim(read, start, share, axis=1)
        return sums(read, late, whole, lacking=pvary(whole, axes) - late)

    def sums(read, features, whole, *, lacking):
        """read: this rank's `features`."""
        beside = jnp.concatenate([features, lacking], axis=1)
        products = jnp.einsum("tm,te->me", read, beside, precision=lax.Precision.HIGHEST)[None]
        energy = jnp.sum(jnp.square(whole))
        missing = jnp.sum(jnp.square(lacking))[None]
        return tuple(all_reduce(x, layout.batch) for x in (products, energy, missing))

    def read(stack, sublayer, params, streams, delay):
        hidden, partial = through(OutputRead(axes), stack, sublayer, params, streams, delay)
        return hidden, all_reduce(partial.astype(jnp.float32), axes)

    def output_statistics(stack, sublayer, params, original, streams, delay):
        _, goal = read(stack, sublayer, original, streams, jnp.int32(0))
        hidden, reached = read(stack, sublayer, params, streams, delay)
        goal, hidden, reached = (
            x.astype(jnp.float32).reshape(-1, x.shape[-1]) for x in (goal, hidden, reached)
        )
        features = all_gather(hidden, axes, dimension=1)
        return sums(hidden, features, goal, lacking=pvary(goal - reached, axes))

    def compiled(local, in_dims, out_dims):
        return steps.compiled(definition, local, in_dims=in_dims, out_dims=out_dims)

    def by_stack(local, in_dims, out_dims, *, layers=1):
        """Of each stack, the programs of its two sublayers, whose first arguments are the params of
        layers.
        """
        found = {}
        for stack in stacks(config):
            layer = jax.tree.map(lambda dims: dims.removeprefix("L"), definition.dims[stack])
            two = (functools.partial(local, stack, sublayer) for sublayer in (0, 1))
            found[stack] = tuple(
                compiled(one, (*[layer] * layers, *in_dims), out_dims) for one in two
            )
        return found

    # Each rank has its own partial sum. It is declared as one array whose last dimension is split
    # over the ranks.
    streams = Streams(("BTD",) * depth, "BTF")
    outside = dict(definition.dims)
    for stack in stacks(config):
        del outside[stack]
    # "F" is the dimension that the ranks split; "1" and "m" no mesh axis splits.
    products = "Fmm" if fresh else "1Fm"
    return Programs(
        begin=compiled(begin, (definition.dims["embedding"], "BT"), streams),
        advance=by_stack(advance, (streams, ""), streams),
        loss=compiled(loss, (outside, streams, "BT"), ""),
        statistics=compiled(statistics, (streams, ""), (products, "", "F")),
        output_statistics=by_stack(output_statistics, (streams, ""), ("1Fm", "", "F"), layers=2),
        dims=streams,
    )
