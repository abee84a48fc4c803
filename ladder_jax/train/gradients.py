"""Loss and gradients of a batch, inside the shard_map: rank by rank, part by part, reduced once."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ladder_jax.config import Loop, Phase, Remat, TrainConfig
from ladder_jax.data.batch import Batch
from ladder_jax.nn import ModelDef, Params
from ladder_jax.parallel import Compiled, Layout, all_reduce, on_mesh, over_ranks, pvary, varying
from ladder_jax.parallel.collectives import DATA_GRADIENTS, EMULATED, LOSS, SHARED_GRADIENTS
from ladder_jax.retrain import NOTHING, Fixed, Plan, objectives


@dataclasses.dataclass(frozen=True)
class Terms:
    """Of the data's loss, as in `nn.loss_sum`: `z_loss`, and `chunk` for its memory alone."""

    z_loss: float = 0.0
    chunk: int = TrainConfig.loss_chunk

    @classmethod
    def of(cls, config: TrainConfig) -> "Terms":
        return cls(config.z_loss, config.loss_chunk)


def loss_and_gradients(
    definition: ModelDef, **settings: Any
) -> Callable[[Params, jax.Array], tuple[jax.Array, Params]]:
    """A (params, tokens [B, T+1] or a Batch) -> (mean loss in nats a token, float32 gradients), to be compiled.

    All weights train, on the data alone; the settings as in `planned`.
    """
    compute = planned(Plan(definition), **settings)

    def of_all(params: Params, tokens: jax.Array | Batch) -> tuple[jax.Array, Params]:
        (loss, _), gradients = compute(params, NOTHING, tokens, {})
        return loss, gradients

    return of_all


def planned(
    plan: Plan,
    *,
    loop: Loop = Loop.SCAN,
    remat: Remat = Remat.NONE,
    accumulate: int = 1,
    sequence_parallel: bool = False,
    terms: Terms = Terms(),
) -> Callable[[Params, Fixed, Any, dict], tuple[tuple[jax.Array, dict], Params]]:
    """A (trained, fixed, tokens or a Batch, ladder_fraction) -> ((mean loss, its terms), float32 gradients).

    ladder_fraction: {"ladder_fraction": [L]} while layers turn to ladder (see residual/anneal.py), else {}.
    accumulate: in how many parts, one after another, a device computes its rows; their gradients are summed in float32.
    """
    layout, dims = plan.definition.layout, plan.trained_dims

    def local(trained, fixed, tokens, ladder_fraction):
        # From here on every rank owns its copy of what is replicated: gradients stay local, in
        # float32, until the one reduction below; none is left for the layer loop to communicate.
        own, held = jax.tree.map(lambda p: pvary(p, layout.all_axes), (trained, fixed))
        # As the stream is between sublayers: else every sublayer's input would bring a second reduction backward.
        ladder_fraction = jax.tree.map(lambda a: pvary(a, layout.batch), ladder_fraction)
        total = _predicted(tokens, layout)
        forward = dict(loop_form=loop, remat=remat, sequence_parallel=sequence_parallel)

        def share(p, part):
            sums = _objective(plan, p, held, part, ladder_fraction, terms, **forward)
            loss, made_of = jax.tree.map(lambda a: a / total, sums)
            return loss, made_of

        found, grads = _accumulated(jax.value_and_grad(share, has_aux=True), own, tokens, accumulate, plan)
        grads = _after_backward(grads, layout, dims)
        with jax.named_scope(LOSS):
            found = jax.tree.map(lambda a: all_reduce(a, layout.batch), found)
        return found, jax.tree.map(lambda g, dims: _reduce_gradient(g, dims, layout), grads, dims)

    return on_mesh(local, layout=layout, in_dims=(dims, plan.fixed_dims, "BT", ""), out_dims=(("", ""), dims))


def mean_loss(definition: ModelDef, *, loop: Loop = Loop.SCAN) -> Callable[[Params, jax.Array], jax.Array]:
    """A compiled (params, tokens [B, T+1] or a Batch) -> mean loss in nats a token, for evaluation."""
    compiled = planned_loss(Plan(definition), loop=loop)
    return lambda params, tokens: compiled(params, NOTHING, tokens)


def planned_loss(plan: Plan, *, loop: Loop = Loop.SCAN) -> Compiled:
    """A compiled (what trains, what is fixed, tokens or a Batch) -> mean loss of the data alone, all layers turned."""
    definition, layout = plan.definition, plan.definition.layout
    plan = dataclasses.replace(plan, teacher=None)  # no part of the loss, and none of what is fixed is read for it

    def local(trained, fixed, tokens):
        loss, _ = _objective(plan, trained, fixed, tokens, {}, Terms(), loop_form=loop)
        with jax.named_scope(LOSS):
            return all_reduce(loss, layout.batch) / _predicted(tokens, layout)

    dims = (plan.trained_dims, plan.fixed_dims, "BT")
    meshed = on_mesh(local, layout=layout, in_dims=dims, out_dims="")
    untaught = lambda trained, fixed, tokens: meshed(trained, Fixed(fixed.frozen), tokens)
    return Compiled(untaught, mesh=layout.mesh, traits=definition.traits(phase=Phase.PREFILL, loop=loop))


def _accumulated(value_and_grad: Callable, params: Params, batch: Any, count: int, plan: Plan) -> tuple[Any, Params]:
    """The sums over `count` parts of a batch's rows: of the loss and its terms, and of the gradients."""
    if count == 1:
        return value_and_grad(params, batch)
    parts = jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, *a.shape[1:]), batch)

    def turn(sums, part):
        return jax.tree.map(jnp.add, sums, value_and_grad(params, part)), None

    zeros = lambda axes, shape: pvary(jnp.zeros(shape, jnp.float32), axes)
    zero = zeros(varying(jax.tree.leaves(batch)[0]), ())
    found = zero, dict.fromkeys(objectives.names(plan), zero)
    return lax.scan(turn, (found, jax.tree.map(lambda p: zeros(varying(p), p.shape), params)), parts)[0]


@jax.named_scope(LOSS)
def _predicted(batch: jax.Array | Batch, layout: Layout) -> int | jax.Array:
    """How many tokens the whole batch predicts, of which this is a shard."""
    if isinstance(batch, Batch):  # at least 1: a batch may be padding throughout
        return jnp.maximum(all_reduce(batch.predicted.sum(), layout.batch), 1)
    return math.prod((batch.shape[0], batch.shape[1] - 1, layout.batch_ranks))


def _objective(
    plan: Plan,
    trained: Params,
    fixed: Fixed,
    batch: jax.Array | Batch,
    ladder_fraction: dict,
    terms: Terms,
    **forward: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`retrain.objective` of this batch shard, equal on its tensor ranks."""

    def local(trained, fixed, batch, ladder_fraction):
        return objectives.objective(
            plan, trained, fixed, batch, ladder_fraction, **dataclasses.asdict(terms), **forward
        )

    in_dims = (plan.trained_dims, plan.fixed_dims, "BT", "")
    return over_ranks(local, layout=plan.definition.layout, in_dims=in_dims, out_dims=("", ""))(
        trained, fixed, batch, ladder_fraction
    )


def _after_backward(gradients: Params, layout: Layout, dims: Params) -> Params:
    """Gradients that ranks of the tensor axes must sum (norm gains and the like), held back to the end.

    Left alone, a compiler may merge their reductions with the last sublayer's, over the same ranks; so
    they are tied to the embedding's gradient, which comes after it; where that does not train, to the layers'.
    """
    if layout.ranks == 1:
        return gradients
    leaves, tree = jax.tree.flatten(gradients)
    first = jax.tree.leaves(gradients.get("embedding", gradients))[0]
    dims = jax.tree.leaves(dims)
    held = [leaf is first or set(_replicated(d, layout)) & set(layout.tensor) for leaf, d in zip(leaves, dims)]
    tied = iter(lax.optimization_barrier([leaf for leaf, hold in zip(leaves, held) if hold]))
    return tree.unflatten([next(tied) if hold else leaf for leaf, hold in zip(leaves, held)])


def _reduce_gradient(gradient: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Sum over every axis on which the parameter is replicated: data, for some fsdp, and for some the tensor ranks."""
    axes = _replicated(dims, layout)
    with jax.named_scope(SHARED_GRADIENTS if set(axes) & set(layout.tensor) else DATA_GRADIENTS):
        return all_reduce(gradient, axes)


def _replicated(dims: str, layout: Layout) -> tuple[str, ...]:
    sharded = [axis for part in layout.spec(dims) if part for axis in ((part,) if isinstance(part, str) else part)]
    return tuple(axis for axis in layout.all_axes if axis not in sharded and axis != EMULATED)
