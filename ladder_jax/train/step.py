"""The training step: gradients inside the shard_map, optimizer outside of it, in one compiled function.

It is guarded: where the loss or a gradient is no number, or the loss jumps, the old state is kept, and no device waits
for the host to find out. All is decided from the reduced loss and gradient norm, so that ranks agree without asking
each other. Runs execute this function, and `ladder-jax overlap` and `plan` compile it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ladder_jax import nn
from ladder_jax.config import Phase, TrainConfig
from ladder_jax.data.batch import Batch
from ladder_jax.nn import ModelDef, Params
from ladder_jax.parallel import Compiled
from ladder_jax.retrain import NOTHING, Fixed, Plan, conversion
from ladder_jax.train import optimizer
from ladder_jax.train.gradients import Terms, planned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 master weights of what trains; optimizer: optax's state; step: int32 [], how many were made.

    mean_loss: float32 [], the recent mean of good steps, which tells whether a loss jumps; good_steps: int32 [], of how
    many at least.
    """

    params: Params
    optimizer: optax.OptState
    step: jax.Array
    mean_loss: jax.Array
    good_steps: jax.Array


BAD = "bad"  # the metric that says whether a step was kept from changing anything
Update = Callable[[TrainState, jax.Array | Batch, Fixed], tuple[TrainState, dict[str, jax.Array]]]


def abstract_state(definition: ModelDef, *, config: TrainConfig, plan: Plan | None = None) -> TrainState:
    """Shapes, dtypes and shardings; each moment of the optimizer lies where its parameter lies."""
    plan = plan or Plan(definition)
    params, replicated = plan.abstract, definition.layout.sharding("")
    here = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated)
    scalar = lambda dtype: jax.ShapeDtypeStruct((), dtype, sharding=replicated)
    moments = jax.eval_shape(optimizer.adamw(config, dims=plan.trained_dims).init, params)
    moments = optax.tree.set(jax.tree.map(here, moments), mu=params, nu=params)
    return TrainState(params, moments, scalar(jnp.int32), scalar(jnp.float32), scalar(jnp.int32))


def abstract_batch(definition: ModelDef, *, config: TrainConfig) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the tokens [B, T+1] of a step on plain text; packed documents bring a Batch."""
    shape = (config.batch, config.sequence + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=definition.layout.sharding("BT"))


def initial_state(
    definition: ModelDef, *, config: TrainConfig, params: Params | None = None, plan: Plan | None = None
) -> TrainState:
    """The state before the first step, on its devices; `params` replaces the initial values, of what trains."""
    plan = plan or Plan(definition)
    params = nn.initialize(definition, seed=config.seed) if params is None else params
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(definition, config=config, plan=plan))
    init = optimizer.adamw(config, dims=plan.trained_dims).init
    none = lambda p: (init(p), jnp.int32(0), jnp.float32(0), jnp.int32(0))
    placed = (shardings.optimizer, shardings.step, shardings.mean_loss, shardings.good_steps)
    return TrainState(params, *jax.jit(none, out_shardings=placed)(params))


def train_step(definition: ModelDef, *, config: TrainConfig, plan: Plan | None = None) -> Compiled:
    """A compiled (state, tokens [B, T+1] or a Batch, what is fixed) -> (state, metrics); the old state is consumed.

    metrics: loss (nats a token), gradient_norm (before clipping), learning_rate; `bad`, bool []: only the step's number
    went on, so that the batch of step s stays a function of the seed and s; of a plan with a teacher the loss's terms,
    and while layers turn to ladder the share of them that has.
    plan: what of the model trains, and towards what; without one all of it does, on the data alone.
    """
    traits = definition.traits(phase=Phase.TRAIN, loop=config.loop, sequence_parallel=config.sequence_parallel)
    step = _guarded(_update(plan or Plan(definition), config=config), config=config)
    return Compiled(step, mesh=definition.layout.mesh, traits=traits, donate_argnums=0)


def _guarded(update: Update, *, config: TrainConfig) -> Update:
    """`update`, kept from changing more than the step's number where it is bad."""

    def step(old: TrainState, tokens: jax.Array | Batch, fixed: Fixed = NOTHING):
        new, metrics = update(old, tokens, fixed)
        loss = metrics["loss"]
        good = jnp.isfinite(loss) & jnp.isfinite(metrics["gradient_norm"])
        if config.spike_factor:
            good &= (old.good_steps < config.spike_window) | (loss <= config.spike_factor * old.mean_loss)
        kept = jax.tree.map(lambda a, b: lax.select(good, a, b), new, old)
        # The plain mean of the first steps, then an exponential one.
        share = 1 / jnp.minimum(old.good_steps + 1, config.spike_window).astype(jnp.float32)
        mean = jnp.where(good, old.mean_loss + share * (loss - old.mean_loss), old.mean_loss)
        counted = dict(step=new.step, mean_loss=mean, good_steps=old.good_steps + good)
        return dataclasses.replace(kept, **counted), {**metrics, BAD: ~good}

    return step


def _update(plan: Plan, *, config: TrainConfig) -> Update:
    """One step of the optimizer, not to be undone."""
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

    def update(state: TrainState, tokens: jax.Array | Batch, fixed: Fixed):
        ladder_fraction = (
            {nn.LADDER_FRACTION: conversion.ladder_fraction(state.step, **turning)} if plan.conversion.steps else {}
        )
        (loss, terms), grads = gradients(state.params, fixed, tokens, ladder_fraction)
        updates, moments = adamw.update(grads, state.optimizer, state.params)
        rate = schedule(state.step)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        metrics = {"loss": loss, **terms, "gradient_norm": optimizer.norm(grads), "learning_rate": rate}
        if ladder_fraction:
            metrics["turned"] = jnp.mean(ladder_fraction[nn.LADDER_FRACTION])
        return dataclasses.replace(state, params=params, optimizer=moments, step=state.step + 1), metrics

    return update
