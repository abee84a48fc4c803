"""One training step: gradients inside the shard_map, optimizer outside of it, in one compiled function."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ladder_jax import nn
from ladder_jax.config import Loop, Phase, Remat, TrainConfig
from ladder_jax.data.batch import Batch
from ladder_jax.nn import Definition, Params
from ladder_jax.parallel import Compiled, Layout, all_reduce, on_mesh, over_ranks, vary
from ladder_jax.parallel.collectives import EMULATED
from ladder_jax.train import optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 master weights; optimizer: optax's state; step: how many updates were made."""

    params: Params
    optimizer: optax.OptState
    step: jax.Array


Update = Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]


def abstract_state(definition: Definition, *, config: TrainConfig) -> TrainState:
    """Shapes, dtypes and shardings; each moment of the optimizer lies where its parameter lies."""
    params, replicated = definition.abstract, definition.layout.sharding("")
    here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated)
    moments = jax.eval_shape(optimizer.adamw(config, definition=definition).init, params)
    moments = optax.tree.set(jax.tree.map(here, moments), mu=params, nu=params)
    return TrainState(params, moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))


def initial_state(definition: Definition, *, config: TrainConfig, params: Params | None = None) -> TrainState:
    """The state before the first step, on its devices; `params` replaces the initial values."""
    params = nn.initialize(definition, seed=config.seed) if params is None else params
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(definition, config=config))
    init = optimizer.adamw(config, definition=definition).init
    make = jax.jit(lambda p: (init(p), jnp.int32(0)), out_shardings=(shardings.optimizer, shardings.step))
    return TrainState(params, *make(params))


def train_step(definition: Definition, *, config: TrainConfig) -> Compiled:
    """A compiled `update`; the old state's buffers are reused."""
    traits = definition.traits(phase=Phase.TRAIN, loop=config.loop)
    return Compiled(update(definition, config=config), mesh=definition.layout.mesh, traits=traits, donate_argnums=0)


def update(definition: Definition, *, config: TrainConfig) -> Update:
    """A (state, tokens [B, T+1] or a Batch) -> (state, metrics), to be compiled.

    metrics: loss (nats a token), gradient_norm (before clipping), learning_rate.
    """
    gradients = loss_and_gradients(definition, loop=config.loop, remat=config.remat)
    adamw, schedule = optimizer.adamw(config, definition=definition), optimizer.schedule(config)

    def step(state: TrainState, tokens: jax.Array):
        loss, grads = gradients(state.params, tokens)
        updates, moments = adamw.update(grads, state.optimizer, state.params)
        rate = schedule(state.step)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads), "learning_rate": rate}
        return TrainState(params, moments, state.step + 1), metrics

    return step


def loss_and_gradients(
    definition: Definition, *, loop: Loop = Loop.SCAN, remat: Remat = Remat.NONE
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """A (params, tokens [B, T+1] or a Batch) -> (mean loss in nats a token, float32 gradients), to be compiled."""
    layout = definition.layout

    def local(params, tokens):
        # From here on every rank owns its copy of what is replicated: gradients stay local, in
        # float32, until the one reduction below; none is left for the layer loop to communicate.
        own = jax.tree.map(lambda p: vary(p, layout.all_axes), params)
        total = _predicted(tokens, layout)
        share = lambda p: _loss_sum(definition, p, tokens, loop, remat) / total
        loss, grads = jax.value_and_grad(share)(own)
        grads = _after_backward(grads, definition)
        return all_reduce(loss, layout.batch), jax.tree.map(
            lambda g, dims: _reduce_gradient(g, dims, layout), grads, definition.dims
        )

    return on_mesh(local, layout=layout, in_dims=(definition.dims, "BT"), out_dims=("", definition.dims))


def mean_loss(definition: Definition, *, loop: Loop = Loop.SCAN) -> Callable[[Params, jax.Array], jax.Array]:
    """A compiled (params, tokens [B, T+1] or a Batch) -> mean loss in nats a token, for evaluation."""
    layout = definition.layout

    def local(params, tokens):
        loss = all_reduce(_loss_sum(definition, params, tokens, loop, Remat.NONE), layout.batch)
        return loss / _predicted(tokens, layout)

    meshed = on_mesh(local, layout=layout, in_dims=(definition.dims, "BT"), out_dims="")
    return Compiled(meshed, mesh=layout.mesh, traits=definition.traits(phase=Phase.PREFILL, loop=loop))


def _predicted(batch: jax.Array | Batch, layout: Layout) -> int | jax.Array:
    """How many tokens the whole batch predicts, of which this is a shard."""
    if isinstance(batch, Batch):  # at least 1: a batch may be padding throughout
        return jnp.maximum(all_reduce(batch.predicted.sum(), layout.batch), 1)
    return math.prod((batch.shape[0], batch.shape[1] - 1, layout.batch_ranks))


def _loss_sum(definition: Definition, params: Params, batch: jax.Array | Batch, loop: Loop, remat: Remat) -> jax.Array:
    """The summed loss of this batch shard, equal on its tensor ranks."""

    def local(params: Any, batch: jax.Array | Batch) -> jax.Array:
        packed = isinstance(batch, Batch)
        tokens = batch.tokens if packed else batch
        place = nn.Packed(batch.segments[:, :-1]) if packed else nn.Begin()
        x, _ = nn.hidden(definition, params, tokens[:, :-1], loop_form=loop, remat=remat, place=place)
        logits = nn.logits(definition, params, x)
        losses = nn.cross_entropy(logits, tokens[:, 1:], axes=definition.layout.tensor)
        return jnp.where(batch.predicted, losses, 0).sum() if packed else losses.sum()

    return over_ranks(local, layout=definition.layout, in_dims=(definition.dims, "BT"), out_dims="")(params, batch)


def _after_backward(gradients: Params, definition: Definition) -> Params:
    """Gradients that ranks of the tensor axes must sum (norm gains and the like), held back to the end.

    Left alone, a compiler may merge their reductions with the last sublayer's, over the same ranks; so
    they are tied to the embedding's gradient, which comes after it.
    """
    leaves, tree = jax.tree.flatten(gradients)
    first = jax.tree.leaves(gradients["embedding"])[0]
    layout, dims = definition.layout, jax.tree.leaves(definition.dims)
    if layout.ranks == 1:
        return gradients
    held = [leaf is first or not any(layout.spec(d)) for leaf, d in zip(leaves, dims)]
    tied = iter(lax.optimization_barrier([leaf for leaf, hold in zip(leaves, held) if hold]))
    return tree.unflatten([next(tied) if hold else leaf for leaf, hold in zip(leaves, held)])


def _reduce_gradient(gradient: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Sum over every axis on which the parameter is replicated: data, and for some the tensor ranks."""
    sharded = [axis for part in layout.spec(dims) if part for axis in ((part,) if isinstance(part, str) else part)]
    axes = tuple(axis for axis in layout.all_axes if axis not in sharded and axis != EMULATED)
    return all_reduce(gradient, axes)
