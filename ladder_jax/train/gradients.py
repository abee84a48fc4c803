"""Loss and gradients of a batch, inside the shard_map: each rank its rows, then one reduction of
every gradient.

Read from the top: `task_gradients` -> `_accumulate` -> `_loss_sum` -> `Pretraining.loss_sum`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn
from ladder_jax.checkpoint import Checkpoint
from ladder_jax.config import Loop, Phase, TrainConfig
from ladder_jax.config.fields import check, check_type
from ladder_jax.data.packing import Batch, Targets
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.model_def import check_params, checked_tokens
from ladder_jax.parallel import Compiled, Layout, all_reduce, on_mesh, over_ranks, pvary
from ladder_jax.parallel.collectives import EMULATED
from ladder_jax.scopes import DATA_GRADIENTS, LOSS, SHARED_GRADIENTS

type Tokens = jax.Array | Batch  # [B, T+1], or packed
type Scheduled = dict[str, jax.Array]  # what a step computes from its number, before the loss
type LossAndTerms = tuple[jax.Array, dict[str, jax.Array]]


class Pretraining:
    """A training task: which parameters train, on which loss, and from which weights.
    `retrain.Retraining` is another.

    Here all weights train, on the cross-entropy of the data's next tokens; with experts see
    nn/router_losses.py. In general the trained parameters have gradients and an optimizer's state;
    the frozen ones, an argument beside them, have none.

    trained_dims, frozen_dims: their dimensions; abstract: shape, dtype and sharding of the trained
    ones. routers: of a model with experts, else None. held_out: the task whose loss is the
    cross-entropy of the data alone, and which reads no more frozen parameters. origin: a line that
    says which checkpoint's weights training starts from. sources_record: the checkpoints that the
    weights come from, as JSON for the run's own checkpoints.
    """

    frozen_dims = {}
    origin = None
    sources_record = {}

    def __init__(self, definition: ModelDef):
        check_type("definition", definition, ModelDef)
        kind = type(definition)
        check(
            kind is ModelDef,
            f"of a {kind.__name__} not all weights train: its task is retrain.Retraining",
        )
        self.definition = definition
        self.held_out = self
        self.trained_dims = definition.dims
        self.abstract = definition.abstract
        self.routers = None
        if definition.config.moe is not None:
            from ladder_jax.nn.router_losses import RouterLosses

            self.routers = RouterLosses(definition)

    def scheduled(self, step: jax.Array) -> Scheduled:
        """Inputs of the loss that follow from the step's number, such as a conversion's ladder
        fraction.
        """
        return {}

    def measured(self, terms: dict[str, jax.Array], scheduled: Scheduled) -> dict[str, jax.Array]:
        """Metrics of these inputs, and of the loss's terms, which are summed over the batch and
        divided by its predicted positions.
        """
        if self.routers:
            return self.routers.metrics(terms)
        return {}

    def loss_sum(
        self,
        trained: Params,
        frozen: Params,
        batch: Targets,
        *,
        scheduled: Scheduled,
        config: TrainConfig,
    ) -> LossAndTerms:
        """On one rank: the loss of its rows, summed over positions, and its terms; equal on its
        tensor ranks.
        """
        positions = nn.Packed(batch.segments)
        run = nn.ForwardPass(
            self.definition, batch.tokens.shape, execution=config.execution, positions=positions
        )
        state, _ = run.embed(trained, batch.tokens)
        chosen = self.routers.begin() if scheduled else None
        state, chosen, _ = run.layers(state, chosen, params=trained)
        x = run.finish(trained, state)
        loss = nn.loss_sum(
            self.definition,
            trained,
            x,
            batch.targets,
            weights=batch.weights,
            z_loss=config.z_loss,
            chunk=config.loss_chunk,
        )
        if not scheduled:  # by the routers
            return loss, {}
        penalty, terms = self.routers.penalty(chosen, batch, scheduled=scheduled, config=config)
        return loss + penalty, terms

    def initial(self, *, seed: int) -> tuple[Params, Params]:
        """(trained, frozen) before the first step."""
        return nn.initialize(self.definition, seed=seed), {}

    def restored(self, checkpoint: Checkpoint, *, extra: Params) -> tuple[Params, Params]:
        """(trained, frozen) of a checkpoint. extra: the arrays that `self.extra` had stored in
        it.
        """
        return checkpoint.params(self.definition), {}

    def extra(self, trained: Params) -> Params:
        """What a checkpoint stores beside the optimizer's state: LoRA's factors, which `exported`
        merges.
        """
        return {}

    def exported(self, trained: Params, frozen: Params) -> Params:
        """All the model's parameters, for a checkpoint."""
        return trained


TrainingTask = Pretraining
"""Another class with the same attributes stands in for it."""


def loss_and_gradients(
    definition: ModelDef, **settings: Any
) -> Callable[[Params, Tokens], tuple[jax.Array, Params]]:
    """A (params, tokens [B, T+1] or a Batch) -> (mean loss in nats a token, float32 gradients), to
    be compiled.

    All weights train. The settings are those of the section `train`: loop, remat, accumulate,
    sequence_parallel, collective_matmul, interleave, z_loss, load_balance, router_z_loss and
    loss_chunk; by default a scan, in one piece.
    """
    config = TrainConfig(**settings)
    compute = task_gradients(Pretraining(definition), config=config)

    def of_all(params: Params, batch: Tokens) -> tuple[jax.Array, Params]:
        (loss, _), gradients = compute(params, {}, batch, {})
        return loss, gradients

    return of_all


def task_gradients(
    task: TrainingTask, *, config: TrainConfig
) -> Callable[[Params, Params, Any, Scheduled], tuple[LossAndTerms, Params]]:
    """A (trained, frozen, tokens or a Batch, scheduled) -> ((mean loss, its terms), float32
    gradients).
    """
    layout = task.definition.layout
    dims = task.trained_dims

    def local(trained, frozen, batch, scheduled):
        # From here on every rank owns its copy of what is replicated: gradients stay local, in
        # float32, until the one reduction below; none is left for the layer loop to communicate.
        own = lambda dims, p: pvary(p, layout.own_axes(dims))
        master = lambda dims, p: own(dims, p.astype(jnp.float32))
        trained = jax.tree.map(master, dims, trained)
        frozen = jax.tree.map(own, task.frozen_dims, frozen)
        # Equal on all tensor ranks, like the residual: otherwise every sublayer's input adds one
        # all-reduce backward.
        scheduled = jax.tree.map(lambda a: pvary(a, layout.batch), scheduled)
        predicted = _num_predicted(batch, layout)
        if task.definition.config.moe is not None:
            counting = task.held_out  # without a teacher
            read = {name: frozen[name] for name in counting.frozen_dims}
            of_step = scheduled

            def terms(part, given):
                inputs = of_step | given
                _, of_part = _loss_sum(counting, trained, read, part, inputs, config)
                return of_part

            of_batch = task.routers.scheduled(terms, batch, predicted=predicted, config=config)
            scheduled = of_step | of_batch

        def mean(trained, part):
            sums = _loss_sum(task, trained, frozen, part, scheduled, config)
            return jax.tree.map(lambda a: a / predicted, sums)

        value_and_grad = jax.value_and_grad(mean, has_aux=True)
        loss, gradients = _accumulate(value_and_grad, trained, batch, count=config.accumulate)
        gradients = _after_backward(gradients, layout, dims)
        with jax.named_scope(LOSS):
            loss = jax.tree.map(lambda a: all_reduce(a, layout.batch), loss)
        return loss, jax.tree.map(
            lambda g, dims: _reduce_gradient(g, dims, layout), gradients, dims
        )

    meshed = on_mesh(
        local, layout=layout, in_dims=(dims, task.frozen_dims, "BT", ""), out_dims=(("", ""), dims)
    )

    def checked(trained, frozen, batch, scheduled):
        return meshed(trained, frozen, _checked(batch, task, trained=trained), scheduled)

    return checked


def mean_loss(
    definition: ModelDef, *, loop: Loop = Loop.SCAN
) -> Callable[[Params, Tokens], jax.Array]:
    """A compiled (params, tokens [B, T+1] or a Batch) -> mean loss in nats a token, for
    evaluation.
    """
    task = Pretraining(definition)
    compiled = held_out_loss(task, loop=loop)
    # here ids have values, inside the program they have none
    return lambda params, batch: compiled(params, {}, _checked(batch, task, trained=params))


def held_out_loss(
    task: TrainingTask, *, loop: Loop = Loop.SCAN, loss_chunk: int = TrainConfig.loss_chunk
) -> Compiled:
    """A compiled (trained, frozen, tokens or a Batch) -> mean cross-entropy in nats a token.

    No teacher and no z-loss count, and of a gradual conversion all layers have their final form.
    """
    task = task.held_out
    config = TrainConfig(loop=loop, loss_chunk=loss_chunk)
    layout = task.definition.layout

    def local(trained, frozen, batch):
        loss, _ = _loss_sum(task, trained, frozen, batch, {}, config)
        with jax.named_scope(LOSS):
            return all_reduce(loss, layout.batch) / _num_predicted(batch, layout)

    meshed = on_mesh(
        local, layout=layout, in_dims=(task.trained_dims, task.frozen_dims, "BT"), out_dims=""
    )

    def without_teacher(trained, frozen, batch):
        read = {name: frozen[name] for name in task.frozen_dims}
        return meshed(trained, read, _checked(batch, task, trained=trained))

    traits = task.definition.traits(config.execution, phase=Phase.PREFILL)
    return Compiled(without_teacher, mesh=layout.mesh, traits=traits)


def _checked(batch: Any, task: TrainingTask, *, trained: Params) -> Any:
    """`batch`, for parameters that must be the task's: a scan would run as many layers of others."""
    check_params(trained, expected=task.abstract)
    is_packed = isinstance(batch, Batch)
    tokens = checked_tokens(
        batch.tokens if is_packed else batch,
        batch_ranks=task.definition.layout.batch_ranks,
        vocab_size=task.definition.config.vocab_size,
    )
    rows, length = tokens.shape
    check(
        rows > 0 and length > 1,
        f"a batch is rows of at least two tokens, each but the first predicted, not {tokens.shape}",
    )
    return dataclasses.replace(batch, tokens=tokens) if is_packed else tokens


def _accumulate(
    value_and_grad: Callable, trained: Params, batch: Any, *, count: int
) -> tuple[LossAndTerms, Params]:
    """The sums of loss, terms and gradients over `count` parts of the batch's rows, one after
    another.
    """
    if count == 1:
        return value_and_grad(trained, batch)

    def split(a):
        rows, *rest = a.shape
        check(rows % count == 0, f"accumulate={count} does not divide a rank's {rows} rows")
        return a.reshape(count, rows // count, *rest)

    def add_part(sums, part):
        of_part = value_and_grad(trained, part)
        return jax.tree.map(jnp.add, sums, of_part), None

    parts = jax.tree.map(split, batch)
    first = lambda: value_and_grad(trained, jax.tree.map(lambda a: a[0], parts))
    zeros = lambda a: jnp.zeros_like(a, jnp.float32)
    sums, _ = lax.scan(add_part, jax.tree.map(zeros, jax.eval_shape(first)), parts)
    return sums


@jax.named_scope(LOSS)
def _num_predicted(batch: Tokens, layout: Layout) -> int | jax.Array:
    """How many tokens the whole batch predicts, of which this is a rank's shard."""
    if isinstance(batch, Batch):  # at least 1: a batch may be padding throughout
        predicted = all_reduce(batch.predicted.sum(), layout.batch)
        return jnp.maximum(predicted, 1)
    rows, length = batch.shape
    return rows * (length - 1) * layout.batch_ranks


def _loss_sum(
    task: TrainingTask,
    trained: Params,
    frozen: Params,
    batch: Tokens,
    scheduled: Scheduled,
    config: TrainConfig,
) -> LossAndTerms:
    """`task.loss_sum` of a rank's shard of a batch."""

    def local(trained, frozen, batch, scheduled):
        packed = isinstance(batch, Batch)
        tokens = batch.tokens if packed else batch
        inputs = tokens[:, :-1]
        targets = tokens[:, 1:]
        if packed:
            weights = batch.predicted.astype(jnp.float32)
            segments = batch.segments[:, :-1]
        else:
            weights = jnp.ones(targets.shape, jnp.float32)
            segments = None
        rows = Targets(inputs, targets, weights, segments)
        return task.loss_sum(trained, frozen, rows, scheduled=scheduled, config=config)

    on_ranks = over_ranks(
        local,
        layout=task.definition.layout,
        in_dims=(task.trained_dims, task.frozen_dims, "BT", ""),
        out_dims=("", ""),
    )
    return on_ranks(trained, frozen, batch, scheduled)


def _after_backward(gradients: Params, layout: Layout, dims: Params) -> Params:
    """Delays those gradients that tensor ranks must sum (of norm gains and the like) until backward
    has ended.

    Otherwise a compiler may merge their reductions with the last sublayer's, over the same ranks. A
    barrier ties them to the embedding's gradient, which is the last; where the embedding is frozen,
    to the layers'.
    """
    if layout.ranks == 1:
        return gradients
    leaves, tree = jax.tree.flatten(gradients)
    last = jax.tree.leaves(gradients.get("embedding", gradients))[0]
    delayed = {}
    for index, of_leaf in enumerate(jax.tree.leaves(dims)):
        shared = set(_replicated(of_leaf, layout)) & set(layout.tensor)
        if shared or leaves[index] is last:
            delayed[index] = leaves[index]
    tied = dict(enumerate(leaves)) | lax.optimization_barrier(delayed)
    return tree.unflatten(tied.values())


def _reduce_gradient(gradient: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Sum over every axis whose ranks have gradients of their own: data, for some fsdp, for some
    the tensor ranks.
    """
    axes = _replicated(dims, layout)
    shared = set(axes) & set(layout.tensor)
    with jax.named_scope(SHARED_GRADIENTS if shared else DATA_GRADIENTS):
        return all_reduce(gradient, axes)


def _replicated(dims: str, layout: Layout) -> tuple[str, ...]:
    without = {EMULATED, *jax.tree.leaves(tuple(layout.spec(dims)))}
    return tuple(axis for axis in layout.own_axes(dims) if axis not in without)
