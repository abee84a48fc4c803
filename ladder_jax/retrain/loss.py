"""A retraining run's loss on one rank: cross-entropy, a teacher's divergence, the distance of
hidden streams, and of a model with experts the routers' losses.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn
from ladder_jax.config import TrainConfig
from ladder_jax.data.packing import Targets
from ladder_jax.nn import ModelDef, Params
from ladder_jax.nn.loss import divergence_sum
from ladder_jax.nn.parameter import DENSE, LAYERS
from ladder_jax.residual import State, Step
from ladder_jax.retrain import lora
from ladder_jax.retrain.conversion import LADDER_FRACTION, Annealed, Terms
from ladder_jax.retrain.plan import ADAPTERS, LOWER, RetrainPlan, part_dims, with_side
from ladder_jax.side import SIDE


class _Converting(nn.ForwardPass):
    """Of a model of which each layer has its ladder fraction, which has no gradient, among its
    arrays.
    """

    def wire_of(self, params):
        modules = {name: module for name, module in params.items() if name != LADDER_FRACTION}
        return Annealed(self.wire.axes, params[LADDER_FRACTION]), modules


def _over_parts(
    run: nn.ForwardPass,
    params: Params,
    dims: Params,
    *,
    below: int,
    ladder_fraction: jax.Array | None = None,
) -> Callable[[State, Any, int, int], tuple[State, Any]]:
    """A (state, extra, first, last) -> the state and `extra` after the layers first..last-1, which
    must lie in one of the two stacks of a model whose lowest layers are apart (see plan.py).

    below: how many layers those are. ladder_fraction: float32 [L], None where no layer is being
        converted.
    """

    def layers(state, extra, first, last):
        if DENSE in params:  # then all are one block (config/retrain.py checks it)
            return run.layers(state, extra, params=params)[:2]
        name, offset = (LOWER, 0) if last <= below else (LAYERS, below)
        of_stack = dims[name]
        stack = jax.tree.map(lambda a: a[first - offset : last - offset], params[name])
        if ladder_fraction is not None:
            stack = {**stack, LADDER_FRACTION: ladder_fraction[first:last]}
            of_stack = {**of_stack, LADDER_FRACTION: "L"}
        state, extra, _ = run.layers(
            state,
            extra,
            params={LAYERS: stack},
            dims={LAYERS: of_stack},
            ranges={LAYERS: range(first, last)},
        )
        return state, extra

    return layers


def loss_sum(
    plan: RetrainPlan,
    trained: Params,
    frozen: Params,
    batch: Targets,
    *,
    scheduled: Terms,
    config: TrainConfig,
) -> tuple[jax.Array, Terms]:
    """(the loss, the terms that the metrics show beside it), each summed over this rank's positions
    and equal on its tensor ranks.

    scheduled: as `TrainingTask.scheduled` has it.
    """
    routers = plan.routers if plan.routers and plan.routers.measures(scheduled) else None
    positions = nn.Packed(batch.segments)

    def forward(definition: ModelDef, of: Callable = nn.forward_pass) -> nn.ForwardPass:
        return of(definition, batch.tokens.shape, execution=config.execution, positions=positions)

    definition = plan.definition
    below = plan.frozen_layers
    params, dims = _with_factors(plan, trained, frozen)
    fraction = scheduled.get(LADDER_FRACTION)
    run = forward(definition, nn.forward_pass if fraction is None else _Converting)
    student_layers = _over_parts(run, params, dims, below=below, ladder_fraction=fraction)
    shared = shared_layers(plan)
    compared = compared_layers(plan)
    # the layer numbers between which layers run as one block
    boundaries = sorted({0, below, shared, definition.config.num_layers, *compared})

    student_states = {}  # after so many layers
    teacher_streams = {}
    state, extra = run.embed(params, batch.tokens)
    extra = routers.begin() if routers else extra
    for first, last in itertools.pairwise(boundaries):
        state, extra = student_layers(state, extra, first, last)
        student_states[last] = state
    x = run.finish(params, state, extra)
    penalties = []
    named = {}
    if routers:
        penalty, named = routers.penalty(extra, batch, scheduled=scheduled, config=config)
        penalties = [penalty]
    if plan.teacher is None:
        total = nn.loss_sum(
            definition,
            params,
            x,
            batch.targets,
            weights=batch.weights,
            z_loss=config.z_loss,
            chunk=config.loss_chunk,
        )
        return sum(penalties, total), named

    shared_params = frozen.get("model", {}) if plan.shares_weights else {}
    teacher_params = lax.stop_gradient({**shared_params, **frozen.get("teacher", {})})
    teacher_dims = part_dims(plan.teacher, below=below)
    teaching = forward(plan.teacher)
    teacher_layers = _over_parts(teaching, teacher_params, teacher_dims, below=below)
    # The teacher starts from the student's stream after the layers that compute the same in both.
    if shared:
        state = teaching.begin(lax.stop_gradient(run.wire.flush(student_states[shared])))
    else:
        state, _ = teaching.embed(teacher_params, batch.tokens)
    for first, last in itertools.pairwise(boundaries):
        if first >= shared:
            state, _ = teacher_layers(state, None, first, last)
            teacher_streams[last] = teaching.wire.flush(state)
    teacher_head = (
        teaching.finish(teacher_params, state),
        nn.output_table(plan.teacher, teacher_params),
    )
    sums = divergence_sum(
        x,
        nn.output_table(definition, params),
        batch.targets,
        batch.weights,
        teacher=teacher_head,
        vocab_size=definition.config.vocab_size,
        axes=definition.layout.tensor,
        alpha=plan.distill.alpha,
        temperature=plan.distill.temperature,
        chunk=config.loss_chunk,
    )
    named |= {"cross_entropy": sums.cross_entropy, "divergence": sums.divergence}
    total = sum(penalties, sums.total)
    if not plan.distill.hidden_weight:
        return total, named
    distances = [  # those after shared layers are zero
        _distance(run.wire.flush(student_states[n]), teacher_streams[n], batch.weights)
        for n in compared
        if n in teacher_streams
    ]
    hidden = sum(distances) / len(compared)
    named["hidden"] = lax.stop_gradient(hidden)
    return total + plan.distill.hidden_weight * hidden, named


def compared_layers(plan: RetrainPlan) -> list[int]:
    """After how many layers the student's stream is compared with the teacher's: every n-th, and
    the last.
    """
    every = plan.distill.hidden_every
    layers = plan.definition.config.num_layers
    return sorted({*range(every, layers, every), layers}) if plan.distill.hidden_weight else []


def _with_factors(plan: RetrainPlan, trained: Params, frozen: Params) -> tuple[Params, Params]:
    """All the model's parts and their dimensions, LoRA's factors and a side network's blocks
    attached to the layers.
    """
    params = {**lax.stop_gradient(frozen.get("model", {})), **trained}
    dims = plan.dims | plan.trained_dims
    if plan.lora.rank:
        for tree in (params, dims):
            tree[LAYERS] = lora.attach(tree[LAYERS], tree.pop(ADAPTERS), scale=plan.lora.scale)
    if plan.side:
        params, dims = (with_side(tree, tree[SIDE]) for tree in (params, dims))
    return params, dims


def shared_layers(plan: RetrainPlan) -> int:
    """How many of the lowest layers compute the same in teacher and student: frozen, and standard in
    both. A teacher's experts drop no row.
    """
    student = plan.definition
    moe = student.config.moe
    if not plan.shares_weights or (moe is not None and moe.drops):
        return 0
    if not all(map(_standard, plan.teacher.topology.layers)):
        return 0
    frozen = student.config.num_layers if plan.side else plan.frozen_layers
    return min(frozen, [*map(_standard, student.topology.layers), False].index(False))


def _standard(steps: tuple[Step, ...]) -> bool:
    """Whether a layer's attention and MLP each read the whole stream before them."""
    return len(steps) == 2 and all(type(step) is Step and step.delay == 0 for step in steps)


def _distance(student: jax.Array, teacher: jax.Array, weights: jax.Array) -> jax.Array:
    """The squared distance of two streams [B, T, D] over the teacher's square; weighted, summed
    over positions.
    """
    teacher = lax.stop_gradient(teacher).astype(jnp.float32)
    square = lambda a: jnp.mean(jnp.square(a), axis=-1)
    return jnp.sum(
        weights * square(student.astype(jnp.float32) - teacher) / (square(teacher) + 1e-6)
    )
