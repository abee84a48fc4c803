"""The loss of a plan's model on one rank: the data's, a teacher's, and how far the streams are from the teacher's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax import nn
from ladder_jax.data.batch import Batch
from ladder_jax.nn import Params
from ladder_jax.nn.divergence import divergence_sum
from ladder_jax.residual import Delayed, State
from ladder_jax.retrain import lora, parts
from ladder_jax.retrain.plan import ADAPTERS, Fixed, Plan


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model in parts, over a batch. ladder_fraction: as in residual/anneal.py, [L]."""

    run: nn.ForwardPass
    params: Params
    dims: Params
    below: int
    trains: Params = dataclasses.field(default_factory=dict)  # of parts in which not all does
    ladder_fraction: jax.Array | None = None

    def layers(self, state: State, first: int, last: int) -> State:
        """The state after the layers first..last-1, all of them on one side of the cut."""
        name, offset = (parts.LOWER, 0) if last <= self.below else (parts.LAYERS, self.below)
        stack, dims = self.params[name], self.dims[name]
        if (first - offset, last - offset) != (0, jax.tree.leaves(stack)[0].shape[0]):
            stack = jax.tree.map(lambda a: a[first - offset : last - offset], stack)
        trains = self.trains.get(name)
        if self.ladder_fraction is not None:
            trains = {**(jax.tree.map(lambda _: True, dims) if trains is None else trains), nn.LADDER_FRACTION: False}
            stack, dims = (
                {**stack, nn.LADDER_FRACTION: self.ladder_fraction[first:last]},
                {**dims, nn.LADDER_FRACTION: "L"},
            )
        return self.run.layers(state, stack, first=first, dims=dims, trains=trains)[0]


def names(plan: Plan) -> tuple[str, ...]:
    """What a loss is made of, beside the whole."""
    if plan.teacher is None:
        return ()
    return ("cross_entropy", "divergence", *(("hidden",) if plan.distill.hidden_weight else ()))


def objective(
    plan: Plan,
    trained: Params,
    fixed: Fixed,
    batch: jax.Array | Batch,
    ladder_fraction: dict[str, jax.Array],
    *,
    z_loss: float,
    chunk: int,
    **forward: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the loss, its `names`), each summed over this rank's positions and equal on its tensor ranks.

    ladder_fraction: {"ladder_fraction": [L]} while layers turn. forward: as in `nn.hidden`.
    """
    packed = isinstance(batch, Batch)
    tokens, targets = (batch.tokens if packed else batch)[:, :-1], (batch.tokens if packed else batch)[:, 1:]
    weights = batch.predicted.astype(jnp.float32) if packed else jnp.ones(targets.shape)
    positions = nn.Packed(batch.segments[:, :-1]) if packed else nn.FullSequence()
    start = lambda definition: nn.ForwardPass(definition, tokens.shape[1], positions=positions, **forward)
    definition, below = plan.definition, plan.frozen_layers
    params, dims = _with_factors(plan, trained, fixed)
    trains = {parts.LAYERS: lora.trains(dims[parts.LAYERS])} if plan.lora.rank else {}
    student = _Model(start(definition), params, dims, below, trains, ladder_fraction.get(nn.LADDER_FRACTION))
    cuts = _cuts(plan)

    streams, taught, shared = {}, {}, _shared(plan)
    state = student.run.embed(params, tokens)
    for first, last in zip(cuts, cuts[1:]):
        state = student.layers(state, first, last)
        streams[last] = lambda state=state: student.run.stream(state)
    x = student.run.finish(params, state)
    if plan.teacher is None:
        total = nn.loss_sum(definition, params, x, targets, weights=weights, z_loss=z_loss, chunk=chunk)
        return total, {}

    frozen = fixed.frozen if plan.shares_weights else {}
    own = lax.stop_gradient({**frozen, **fixed.teacher})
    teacher = _Model(start(plan.teacher), own, parts.cut_dims(plan.teacher, below=below), below)
    # Below the first layer that differs or trains the two are one computation.
    state = teacher.run.begin(lax.stop_gradient(streams[shared]())) if shared else teacher.run.embed(own, tokens)
    for first, last in zip(cuts, cuts[1:]):
        if first >= shared:
            state = teacher.layers(state, first, last)
            taught[last] = teacher.run.stream(state)
    wanted = teacher.run.finish(own, state), nn.output_table(plan.teacher, own)
    sums = divergence_sum(
        x,
        nn.output_table(definition, params),
        targets,
        weights,
        teacher=wanted,
        vocab_size=definition.config.vocab_size,
        axes=definition.layout.tensor,
        alpha=plan.distill.alpha,
        temperature=plan.distill.temperature,
        chunk=chunk,
    )
    terms = {"cross_entropy": sums.cross_entropy, "divergence": sums.divergence}
    if not plan.distill.hidden_weight:
        return sums.total, terms
    distances = [_distance(streams[at](), taught[at], weights) for at in matched(plan) if at in taught]
    hidden = sum(distances) / len(distances)
    return sums.total + plan.distill.hidden_weight * hidden, {**terms, "hidden": lax.stop_gradient(hidden)}


def matched(plan: Plan) -> list[int]:
    """After how many layers streams are compared; the last is, always."""
    every, layers = plan.distill.hidden_every, plan.definition.config.num_layers
    return sorted({*range(every, layers, every), layers}) if plan.distill.hidden_weight else []


def _with_factors(plan: Plan, trained: Params, fixed: Fixed) -> tuple[Params, Params]:
    """The model's parts with their dimensions."""
    params = {**lax.stop_gradient(fixed.frozen), **trained}
    dims = {**plan.fixed_dims.frozen, **plan.trained_dims}
    if plan.lora.rank:
        for tree in (params, dims):
            tree[parts.LAYERS] = lora.beside(tree[parts.LAYERS], tree.pop(ADAPTERS), scale=plan.lora.scale)
    return params, dims


def _shared(plan: Plan) -> int:
    """How many of the lowest layers the teacher has in common with the model: frozen, and standard in both."""
    if not plan.shares_weights or any(plan.teacher.topology.delays) or any(plan.teacher.topology.joint):
        return 0
    kinds = zip(plan.definition.topology.layers, plan.teacher.topology.layers)
    waits = [
        all(isinstance(s, Delayed) and s.delay == 0 for s in mine) and len(mine) == len(its) for mine, its in kinds
    ]
    return min(plan.frozen_layers, [*waits, False].index(False))


def _cuts(plan: Plan) -> list[int]:
    layers = plan.definition.config.num_layers
    return sorted({0, plan.frozen_layers, _shared(plan), layers, *matched(plan)})


def _distance(x: jax.Array, wanted: jax.Array, weights: jax.Array) -> jax.Array:
    """The squared distance of two streams [B, T, D], over the wanted one's square; summed over positions."""
    wanted = lax.stop_gradient(wanted).astype(jnp.float32)
    square = lambda a: jnp.mean(jnp.square(a), axis=-1)
    return jnp.sum(weights * square(x.astype(jnp.float32) - wanted) / (square(wanted) + 1e-6))
