"""The training step: gradients inside the shard_map, AdamW outside of it, in one compiled function.

AdamW is the paper's (arXiv 2501.06589, section 4.1): clipping, decoupled weight decay, warm-up and
cosine. The step is guarded: where the loss or a gradient is not finite, or the loss jumps, it keeps
the old state, so no device waits for the host to decide. The decision is made from the reduced loss
and gradient norm, which are equal on all ranks. Runs execute this function, and
`ladder-jax overlap` and `plan` compile it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ladder_jax import nn
from ladder_jax.config import Phase, TrainConfig
from ladder_jax.config.fields import check_type
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.model_def import check_params
from ladder_jax.nn.parameter import is_matrix
from ladder_jax.parallel import Compiled, apart, on_own_mesh
from ladder_jax.scopes import GRADIENT_NORM
from ladder_jax.train.gradients import Pretraining, Tokens, TrainingTask, task_gradients


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """params: float32 master weights of what trains; optimizer: optax's state; step: int32 [], how
    many were made.

    mean_loss: float32 [], the recent mean over good steps, from which a loss is judged to jump;
    good_steps: int32 [], how many there were.
    """

    params: Params
    optimizer: optax.OptState
    step: jax.Array
    mean_loss: jax.Array
    good_steps: jax.Array

    def __repr__(self) -> str:
        count = sum(array.size for array in jax.tree.leaves(self.params))
        return f"TrainState(step={self.step!r}, {count:,} parameters, mean_loss={self.mean_loss!r})"


BAD = "bad"  # the metric that says whether a step kept the old state
Metrics = dict[str, jax.Array]


def train_step(
    definition: ModelDef, *, config: TrainConfig, task: TrainingTask | None = None
) -> Compiled:
    """A compiled (state, tokens [B, T+1] or a Batch, frozen parameters) -> (state, metrics); the
    old state is consumed.

    metrics: loss (nats a token), gradient_norm (before clipping), learning_rate; `bad`, bool []:
    only the step's number went on, so that the batch of step s stays a function of the seed and s;
    and the task's own.
    task: which parameters train, on which loss; by default all, on the data. Only another one has
        frozen parameters.
    """
    check_type("definition", definition, ModelDef)
    check_type("config", config, TrainConfig)
    task = task or Pretraining(definition)
    gradients = task_gradients(task, config=config)
    optimizer = adamw(config, dims=task.trained_dims)
    schedule = learning_rate(config)

    def step(
        old: TrainState, batch: Tokens, frozen: Params | None = None
    ) -> tuple[TrainState, Metrics]:
        scheduled = task.scheduled(old.step)
        (loss, terms), grads = gradients(old.params, frozen or {}, batch, scheduled)
        updates, moments = optimizer.update(grads, old.optimizer, old.params)
        rate = schedule(old.step)
        params = jax.tree.map(lambda p, u: p - rate * u, old.params, updates)
        if task.routers:
            params = task.routers.balanced(params, terms, config=config)
        metrics = {
            "loss": loss,
            **task.measured(terms, scheduled),
            "gradient_norm": jax.named_scope(GRADIENT_NORM)(optax.tree.norm)(grads),
            "learning_rate": rate,
        }
        new = dataclasses.replace(old, params=params, optimizer=moments, step=old.step + 1)
        return _keep_if_good(new, old, metrics, config=config)

    traits = definition.traits(config.execution, phase=Phase.TRAIN)
    out_dims = state_dims(config=config, task=task), ""
    whole = on_own_mesh(step, layout=definition.layout, out_dims=out_dims)
    return Compiled(whole, mesh=definition.layout.mesh, traits=traits, donate_argnums=0)


def _keep_if_good(
    new: TrainState, old: TrainState, metrics: Metrics, *, config: TrainConfig
) -> tuple[TrainState, Metrics]:
    """`new`, or of a bad step `old` with the step's number counted."""
    loss = metrics["loss"]
    mean = old.mean_loss
    good = jnp.isfinite(loss) & jnp.isfinite(metrics["gradient_norm"])
    if config.spike_factor:
        too_few = old.good_steps < config.spike_window
        good &= too_few | (loss <= config.spike_factor * mean)
    kept = jax.tree.map(lambda a, b: lax.select(good, a, b), new, old)
    # The plain mean of the first steps, then an exponential one.
    count = jnp.minimum(old.good_steps + 1, config.spike_window)
    weight = 1 / count.astype(jnp.float32)
    moved = mean + weight * (loss - mean)
    mean = jnp.where(good, moved, mean)
    counted = dataclasses.replace(
        kept, step=new.step, mean_loss=mean, good_steps=old.good_steps + good
    )
    return counted, {**metrics, BAD: ~good}


def adamw(config: TrainConfig, *, dims: Params) -> optax.GradientTransformation:
    """The update before the learning rate, of parameters with these dimensions.

    It sees global arrays, so its norm is that of all shards.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    # Norm gains and biases are not decayed: only what is multiplied with activations.
    decayed = jax.tree.map(is_matrix, dims)
    return optax.chain(
        clip._replace(update=jax.named_scope(GRADIENT_NORM)(clip.update)),
        optax.scale_by_adam(config.beta1, config.beta2, config.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(config.weight_decay, mask=decayed),
    )


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear from 0 to the peak, then a cosine to a fraction of it. A run shorter than its warm-up
    only warms up.
    """
    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps)
    cosine = optax.cosine_decay_schedule(
        peak,
        max(config.steps - warmup, 1),
        alpha=config.final_learning_rate_fraction,
    )
    if warmup == 0:
        return cosine
    # Step 0 already moves: (step + 1) / warmup of the peak.
    linear = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([linear, cosine], [warmup])


def state_dims(*, config: TrainConfig, task: TrainingTask) -> TrainState:
    """The dimensions of a state's arrays; each of the optimizer's moments has its parameter's."""
    dims = task.trained_dims
    state = jax.eval_shape(_first(config, task), task.abstract)
    moments = jax.tree.map(lambda _: "", state.optimizer)
    return TrainState(dims, optax.tree.set(moments, mu=dims, nu=dims), "", "", "")


def _first(config: TrainConfig, task: TrainingTask) -> Callable[[Params], TrainState]:
    """A function from what trains to the state before the first step."""
    init = adamw(config, dims=task.trained_dims).init
    return lambda params: TrainState(
        params, init(params), jnp.int32(0), jnp.float32(0), jnp.int32(0)
    )


def abstract_state(
    definition: ModelDef, *, config: TrainConfig, task: TrainingTask | None = None
) -> TrainState:
    """Shapes, dtypes and shardings; each of the optimizer's moments is sharded like its
    parameter.
    """
    task = task or Pretraining(definition)
    place = lambda a, dims: a.update(sharding=definition.layout.sharding(dims))
    shapes = jax.eval_shape(_first(config, task), task.abstract)
    return jax.tree.map(place, shapes, state_dims(config=config, task=task))


def abstract_batch(definition: ModelDef, *, config: TrainConfig) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a step's tokens [B, T+1]; of packed documents a step takes a
    Batch instead.
    """
    shape = (config.batch, config.sequence + 1)
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=definition.layout.sharding("BT"))


def initial_state(
    definition: ModelDef,
    *,
    config: TrainConfig,
    params: Params | None = None,
    task: TrainingTask | None = None,
) -> TrainState:
    """The state before the first step, on its devices. params: what trains, as float32 (default:
    new weights).
    """
    check_type("config", config, TrainConfig)
    task = task or Pretraining(definition)
    if params is None:
        params = nn.initialize(definition, seed=config.seed)
    check_params(params, expected=task.abstract)
    params = jax.tree.map(lambda a: a.astype(jnp.float32, copy=False), params)
    without = lambda state: dataclasses.replace(state, params=None)  # which are not copied
    first = _first(config, task)
    shapes = abstract_state(definition, config=config, task=task)
    shardings = jax.tree.map(lambda a: a.sharding, without(shapes))
    rest = apart(jax.jit(lambda params: without(first(params)), out_shardings=shardings))
    return dataclasses.replace(rest(params), params=params)


OPTIMIZER = ("count", "mu", "nu")  # the names of the optimizer's arrays in a checkpoint


def optimizer_to_dict(state: optax.OptState) -> Params:
    """The optimizer's state as a plain nested dict, for checkpoints."""
    return {name: optax.tree.get(state, name) for name in OPTIMIZER}


def optimizer_from_dict(tree: Params, *, like: optax.OptState) -> optax.OptState:
    return optax.tree.set(like, **{name: tree[name] for name in OPTIMIZER})
