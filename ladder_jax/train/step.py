"""One training step: gradients inside the shard_map, optimizer outside of it, in one compiled function."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from ladder_jax import nn
from ladder_jax.config import Phase, TrainConfig
from ladder_jax.nn import Definition, Params
from ladder_jax.parallel import Compiled
from ladder_jax.retrain import NOTHING, Fixed, Plan, conversion
from ladder_jax.train import optimizer
from ladder_jax.train.gradients import Terms, planned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 master weights of what trains; optimizer: optax's state; step: how many updates were made."""

    params: Params
    optimizer: optax.OptState
    step: jax.Array


Update = Callable[[TrainState, jax.Array, Fixed], tuple[TrainState, dict[str, jax.Array]]]


def abstract_state(definition: Definition, *, config: TrainConfig, plan: Plan | None = None) -> TrainState:
    """Shapes, dtypes and shardings; each moment of the optimizer lies where its parameter lies."""
    plan = plan or Plan(definition)
    params, replicated = plan.abstract, definition.layout.sharding("")
    here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated)
    moments = jax.eval_shape(optimizer.adamw(config, dims=plan.trained_dims).init, params)
    moments = optax.tree.set(jax.tree.map(here, moments), mu=params, nu=params)
    return TrainState(params, moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))


def initial_state(
    definition: Definition, *, config: TrainConfig, params: Params | None = None, plan: Plan | None = None
) -> TrainState:
    """The state before the first step, on its devices; `params` replaces the initial values, of what trains."""
    plan = plan or Plan(definition)
    params = nn.initialize(definition, seed=config.seed) if params is None else params
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(definition, config=config, plan=plan))
    init = optimizer.adamw(config, dims=plan.trained_dims).init
    make = jax.jit(lambda p: (init(p), jnp.int32(0)), out_shardings=(shardings.optimizer, shardings.step))
    return TrainState(params, *make(params))


def train_step(definition: Definition, *, config: TrainConfig, plan: Plan | None = None) -> Compiled:
    """A compiled `update`; the old state's buffers are reused."""
    traits = definition.traits(phase=Phase.TRAIN, loop=config.loop, sequence_parallel=config.sequence_parallel)
    step = update(plan or Plan(definition), config=config)
    return Compiled(step, mesh=definition.layout.mesh, traits=traits, donate_argnums=0)


def update(plan: Plan, *, config: TrainConfig) -> Update:
    """A (state, tokens [B, T+1] or a Batch, what is fixed) -> (state, metrics), to be compiled.

    metrics: loss (nats a token), gradient_norm (before clipping), learning_rate; of a plan with a teacher the loss's
    terms, and while layers turn to ladder the share of them that has.
    """
    gradients = planned(
        plan,
        loop=config.loop,
        remat=config.remat,
        accumulate=config.accumulate,
        sequence_parallel=config.sequence_parallel,
        terms=Terms.of(config),
    )
    adamw, schedule = optimizer.adamw(config, dims=plan.trained_dims), optimizer.schedule(config)
    turning = dict(topology=plan.definition.topology, config=plan.conversion)

    def step(state: TrainState, tokens: jax.Array, fixed: Fixed = NOTHING):
        late = {nn.LATE: conversion.late(state.step, **turning)} if plan.conversion.steps else {}
        (loss, terms), grads = gradients(state.params, fixed, tokens, late)
        updates, moments = adamw.update(grads, state.optimizer, state.params)
        rate = schedule(state.step)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, **terms, "gradient_norm": optax.tree.norm(grads), "learning_rate": rate}
        if late:
            metrics["turned"] = jnp.mean(late[nn.LATE])
        return TrainState(params, moments, state.step + 1), metrics

    return step
