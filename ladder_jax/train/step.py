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
from ladder_jax.nn import Definition, Params
from ladder_jax.parallel import Compiled, Layout, all_reduce, on_mesh, over_ranks, vary, varying
from ladder_jax.parallel.collectives import EMULATED
from ladder_jax.train import optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 master weights; optimizer: optax's state; step: how many updates were made."""

    params: Params
    optimizer: optax.OptState
    step: jax.Array


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
    """A compiled (state, tokens [B, T+1]) -> (state, metrics); the old state's buffers are reused.

    metrics: loss (nats a token), gradient_norm (before clipping), learning_rate.
    """
    gradients = loss_and_gradients(
        definition,
        loop=config.loop,
        remat=config.remat,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        terms=Terms.of(config),
    )
    adamw, schedule = optimizer.adamw(config, definition=definition), optimizer.schedule(config)

    def step(state: TrainState, tokens: jax.Array):
        loss, grads = gradients(state.params, tokens)
        updates, moments = adamw.update(grads, state.optimizer, state.params)
        rate = schedule(state.step)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads), "learning_rate": rate}
        return TrainState(params, moments, state.step + 1), metrics

    traits = definition.traits(phase=Phase.TRAIN, loop=config.loop, sequence_parallel=config.sequence_parallel)
    return Compiled(step, mesh=definition.layout.mesh, traits=traits, donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a loss is made of, as in `nn.loss_sum`: `z_loss`, and `chunk` for its memory alone."""

    z_loss: float = 0.0
    chunk: int = TrainConfig.loss_chunk

    @classmethod
    def of(cls, config: TrainConfig) -> "Terms":
        return cls(config.z_loss, config.loss_chunk)


def loss_and_gradients(
    definition: Definition,
    *,
    loop: Loop = Loop.SCAN,
    remat: Remat = Remat.NONE,
    accumulate: int = 1,
    sequence_parallel: bool = False,
    terms: Terms = Terms(),
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """A (params, tokens [B, T+1]) -> (mean loss in nats a token, float32 gradients), to be compiled.

    accumulate: in how many parts, one after another, a device computes its rows; their gradients are summed in float32.
    """
    layout = definition.layout

    def local(params, tokens):
        # From here on every rank owns its copy of what is replicated: gradients stay local, in
        # float32, until the one reduction below; none is left for the layer loop to communicate.
        own = jax.tree.map(lambda p: vary(p, layout.all_axes), params)
        total = math.prod((tokens.shape[0], tokens.shape[1] - 1, layout.batch_ranks))
        forward = dict(loop_form=loop, remat=remat, sequence_parallel=sequence_parallel)
        share = lambda p, part: _loss_sum(definition, p, part, terms, **forward) / total
        loss, grads = _accumulated(jax.value_and_grad(share), own, tokens, accumulate)
        grads = _after_backward(grads, definition)
        return all_reduce(loss, layout.batch), jax.tree.map(
            lambda g, dims: _reduce_gradient(g, dims, layout), grads, definition.dims
        )

    return on_mesh(local, layout=layout, in_dims=(definition.dims, "BT"), out_dims=("", definition.dims))


def mean_loss(definition: Definition, *, loop: Loop = Loop.SCAN) -> Callable[[Params, jax.Array], jax.Array]:
    """A compiled (params, tokens [B, T+1]) -> mean loss in nats a token, for evaluation."""
    layout = definition.layout

    def local(params, tokens):
        total = math.prod((tokens.shape[0], tokens.shape[1] - 1, layout.batch_ranks))
        return all_reduce(_loss_sum(definition, params, tokens, Terms(), loop_form=loop), layout.batch) / total

    meshed = on_mesh(local, layout=layout, in_dims=(definition.dims, "BT"), out_dims="")
    return Compiled(meshed, mesh=layout.mesh, traits=definition.traits(phase=Phase.PREFILL, loop=loop))


def _accumulated(value_and_grad: Callable, params: Params, batch: Any, count: int) -> tuple[jax.Array, Params]:
    """The sums over `count` parts of a batch's rows."""
    if count == 1:
        return value_and_grad(params, batch)
    parts = jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, *a.shape[1:]), batch)

    def turn(sums, part):
        return jax.tree.map(jnp.add, sums, value_and_grad(params, part)), None

    zeros = lambda axes, shape: vary(jnp.zeros(shape, jnp.float32), axes)
    start = zeros(varying(jax.tree.leaves(batch)[0]), ()), jax.tree.map(lambda p: zeros(varying(p), p.shape), params)
    return lax.scan(turn, start, parts)[0]


def _loss_sum(definition: Definition, params: Params, tokens: jax.Array, terms: Terms, **forward: Any) -> jax.Array:
    """The summed loss of this batch shard, equal on its tensor ranks; `forward` as in `nn.hidden`."""

    def local(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = nn.hidden(definition, params, tokens[:, :-1], **forward)
        return nn.loss_sum(definition, params, x, tokens[:, 1:], **dataclasses.asdict(terms))

    return over_ranks(local, layout=definition.layout, in_dims=(definition.dims, "BT"), out_dims="")(params, tokens)


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
    held = [leaf is first or set(_replicated(d, layout)) & set(layout.tensor) for leaf, d in zip(leaves, dims)]
    tied = iter(lax.optimization_barrier([leaf for leaf, hold in zip(leaves, held) if hold]))
    return tree.unflatten([next(tied) if hold else leaf for leaf, hold in zip(leaves, held)])


def _reduce_gradient(gradient: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Sum over every axis on which the parameter is replicated: data, for some fsdp, and for some the tensor ranks."""
    return all_reduce(gradient, _replicated(dims, layout))


def _replicated(dims: str, layout: Layout) -> tuple[str, ...]:
    sharded = [axis for part in layout.spec(dims) if part for axis in ((part,) if isinstance(part, str) else part)]
    return tuple(axis for axis in layout.all_axes if axis not in sharded and axis != EMULATED)
