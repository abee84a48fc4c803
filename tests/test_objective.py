"""Teachers, frozen layers, low-rank factors, layers that turn to ladder: values and gradients
against dense ones.
"""

import functools
from dataclasses import replace

import autograd.numpy as anp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from ladder_jax import config
from ladder_jax.config import (
    START,
    CollectiveMatmul,
    ConversionConfig,
    DistillConfig,
    LoraConfig,
    Pace,
    TrainConfig,
)
from ladder_jax.data.packing import Batch
from ladder_jax.retrain import ADAPTERS, Retraining, conversion
from ladder_jax.retrain.lora import LowRank
from ladder_jax.train import step as steps
from ladder_jax.train.gradients import task_gradients
from tests import cases, experts, reference
from tests.covering import full
from tests.refusals import refused

TWO = dict(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, vocab_size=61)
TOKENS = cases.tokens((4, 7), vocab=61)
TAU = 2.0
ALPHA = 0.7
HIDDEN = 0.5
SETTINGS = {"last": dict(residual="ladder", ladder_layers="1"), "all": dict(residual="ladder")}


def define(which="last", *, fsdp=1, tensor=2, **more):
    return cases.define("standard", fsdp=fsdp, tensor=tensor, **TWO, **SETTINGS[which], **more)


def original(definition):
    """The same weights as a standard model."""
    standard = replace(definition.config, residual="standard", ladder_layers=None, ranks=None)
    return replace(definition, config=standard)


def shape(definition, kind, layers=None):
    model = definition.config
    return reference.Shape(
        model.num_layers, model.num_heads, model.num_kv_heads, model.vocab_size, kind, 1, layers
    )


def compute(plan, params, tokens=TOKENS, *, trained=None, scheduled=None, **settings):
    """((loss, terms), gradients) of a plan's weights, with what trained, and what was fixed.
    settings: of `train`.
    """
    mine, fixed = plan.split(cases.place(params, plan.definition))
    mine = mine if trained is None else cases.place(trained, plan)
    function = task_gradients(plan, config=TrainConfig(**settings))
    return jax.jit(function)(mine, fixed, tokens, scheduled or {}), fixed


def trained_part(tree):
    """Of a model whose embedding and lowest layer are frozen."""
    return {name: tree[name] for name in ("final_norm", "head")} | {
        "layers": jax.tree.map(lambda a: a[1:], tree["layers"])
    }


def moved(params, other):
    """A student that has moved away from its teacher's `params` where it trains, to `other`."""
    layers = jax.tree.map(
        lambda a, b: np.concatenate([a[:1], b[1:]]), params["layers"], other["layers"]
    )
    return {**other, "embedding": params["embedding"], "layers": layers}


def distillation(teacher, *, forward=reference.logits, weights=1.0, hidden=0.0):
    """In float64: the loss of a model that `teacher` teaches as a standard model.

    forward: (params, tokens, shape, seen) to its logits; appends the inputs of its experts to
    `seen`, for the routers' losses. weights: of the positions. hidden: of the distance between both
    models' streams.
    """

    teacher = jax.tree.map(np.float64, teacher)

    def loss(params, tokens, shape):
        logp = lambda scores: scores - reference.logsumexp(scores)[..., None]
        seen = []
        inputs = tokens[:, :-1]
        of_teacher = replace(shape, kind="standard")
        scores = forward(params, inputs, shape, seen)
        ours = logp(scores / TAU)
        theirs = logp(reference.logits(teacher, inputs, of_teacher) / TAU)
        divergence = (anp.exp(theirs) * (theirs - ours)).sum(-1)
        entropy = -reference.picked(logp(scores), tokens[:, 1:])
        mixed = (1 - ALPHA) * entropy + ALPHA * TAU**2 * divergence
        if hidden:
            x, y = (
                reference.streams(p, inputs, s)[0]
                for p, s in ((params, shape), (teacher, of_teacher))
            )
            mixed = mixed + hidden * ((x - y) ** 2).mean(-1) / ((y**2).mean(-1) + 1e-6)
        learnt = np.broadcast_to(weights, mixed.shape)
        routers = experts.penalties(params["layers"], seen, shape) if shape.experts else 0.0
        return (learnt * mixed).sum() / learnt.sum() + routers

    return loss


def check(plan, loss, of, student, tokens, *, batch=None, part=lambda tree: tree, **settings):
    """The plan's loss and gradients of a `student`'s `part` that trains, of the tokens or a `batch`
    of them, are those of `loss` in float64. What else is measured, and what was fixed.
    """
    params = cases.parameters(plan.definition)
    trained = part(student)
    batch = tokens if batch is None else batch
    ((value, terms), grads), fixed = compute(plan, params, batch, trained=trained, **settings)
    expected, wanted = reference.evaluate(loss, student, tokens, of, gradient=True)
    cases.assert_close((value, grads), (expected, part(wanted)), definition=plan.definition)
    return terms, fixed


DISTILL = DistillConfig(START, alpha=ALPHA, temperature=TAU)


@pytest.mark.parametrize(
    "mesh, every", [(dict(fsdp=2, tensor=2), 1), full(dict(tensor=4), 2)], ids=str
)
def test_distillation_is_the_dense_one(mesh, every):
    """Frozen embedding and lower layer, a batch with a mask, chunks. Streams that are shared have
    no distance, and count in the mean.
    """
    definition = define(**mesh)
    distill = replace(DISTILL, hidden_weight=HIDDEN, hidden_every=every)
    plan = Retraining(definition, 1, distill=distill, teacher=original(definition))
    params = cases.parameters(definition)
    student = moved(params, cases.parameters(definition, seed=5))
    learnt = np.random.default_rng(0).integers(0, 2, TOKENS.shape).astype(np.int32)
    hidden = HIDDEN * every / 2
    taught = distillation(params, weights=learnt[:, 1:].astype(float), hidden=hidden)
    settings = dict(batch=Batch(TOKENS, np.ones_like(TOKENS), learnt), loss_chunk=8)
    of = shape(definition, "ladder", (1,))
    terms, fixed = check(plan, taught, of, student, TOKENS, part=trained_part, **settings)
    assert set(terms) == {"cross_entropy", "divergence", "hidden"}
    # What is shared lies there once: the teacher holds no more than what trains.
    assert set(fixed["model"]) == {"embedding", "lower"}
    assert set(fixed["teacher"]) == set(trained_part(params))


def test_a_fresh_ladder_emulated_on_one_device_is_taught():
    """The teacher computes on the emulated ranks, too; what is accumulated in parts is the same."""
    definition = cases.define("ladder-fresh", ranks=2, **TWO)
    plan = Retraining(definition, distill=DISTILL, teacher=original(definition))
    taught = distillation(cases.parameters(definition))
    of = cases.shape("ladder-fresh", definition.config, ranks=2)
    check(plan, taught, of, cases.parameters(definition, seed=5), TOKENS, accumulate=2)


def check_low_rank(plan, tokens, of, *, count, **settings):
    """Of factors that do something, for `count` matrices: the loss is that of the model that they
    are merged into, and their gradients are the chain rule's of its matrices' in float64. The
    parameters without them and the merged ones.
    """
    rng = np.random.default_rng(3)
    factors = jax.tree.map(lambda a: 0.3 * rng.standard_normal(a.shape, np.float32), plan.abstract)
    params = cases.parameters(plan.definition)
    limit = cases.bound(plan.definition.config, passes=2)
    ((loss, _), grads), fixed = compute(plan, params, tokens, trained=factors, **settings)
    merged = jax.tree.map(np.asarray, plan.exported(cases.place(factors, plan), fixed))
    expected, slopes = reference.evaluate(reference.loss, merged, tokens, of, gradient=True)
    assert cases.error(loss, expected) < limit
    dims, slopes = (
        traverse_util.flatten_dict(tree["layers"]) for tree in (plan.definition.dims, slopes)
    )
    factors, grads = (traverse_util.flatten_dict(tree[ADAPTERS]) for tree in (factors, grads))
    assert len(factors) == 2 * count
    for *path, name in factors:
        path = tuple(path)
        of_name = dict(zip(("down", "up"), LowRank.dims(dims[path])))
        (other,) = of_name.keys() - {name}
        wanted = plan.lora.scale * np.einsum(
            f"{dims[path]},{of_name[other]}->{of_name[name]}",
            slopes[path][plan.frozen_layers :],
            factors[*path, other],
        )
        assert cases.error(grads[*path, name], wanted) < limit, (path, name)
    return params, merged


LORA = LoraConfig(rank=2, alpha=4.0)
RINGS = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)


@pytest.mark.parametrize("form", [{}, RINGS], ids=["reduced", "rings"])
def test_merged_low_rank_factors_equal_unmerged(form):
    """Gathered and scattered in rings, too; what is frozen stays."""
    plan = Retraining(define(fsdp=2), 1, LORA)
    of = shape(plan.definition, "ladder", (1,))
    params, merged = check_low_rank(plan, TOKENS, of, count=7, **form)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), merged, params)
    assert not any(jax.tree.leaves({**changed, "layers": 0}))
    assert changed["layers"]["mlp"]["down"]
    # a frozen layer
    assert not (merged["layers"]["mlp"]["down"][0] != params["layers"]["mlp"]["down"][0]).any()


def test_what_is_frozen_has_no_optimizer_state():
    frozen = Retraining(define(fsdp=2), 1)
    low_rank = replace(frozen, lora=LORA)
    sizes = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    for plan, trained in (low_rank, {ADAPTERS}), (frozen, {"layers", "final_norm", "head"}):
        state = steps.abstract_state(plan.definition, config=TrainConfig(), task=plan)
        assert set(state.params) == trained
        assert sizes(state.optimizer) == 2 * sizes(plan.abstract) + 1
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.params["layers"])} == {1}


def test_layers_between_standard_and_ladder():
    """One compiled program; at both ends, in between and of each layer for itself the recurrence,
    in float64.
    """
    definition = define("all")
    params = cases.parameters(definition)
    plan = Retraining(definition, conversion=ConversionConfig(steps=4))
    mine, fixed = plan.split(cases.place(params, definition))
    function = jax.jit(task_gradients(plan, config=TrainConfig()))
    for fraction, kind, of_reference in (
        ((0.0, 0.0), "standard", None),
        ((0.25, 0.75), "ladder", (0.25, 0.75)),
        ((0.0, 1.0), "ladder", (0.0, 1.0)),
        ((1.0, 1.0), "ladder", None),
    ):
        (found, _), grads = function(
            mine, fixed, TOKENS, {"ladder_fraction": jnp.float32(fraction)}
        )
        loss = functools.partial(reference.loss, fraction=of_reference)
        expected = reference.evaluate(loss, params, TOKENS, shape(definition, kind), gradient=True)
        cases.assert_close((found, grads), expected, definition=definition)


@pytest.mark.parametrize("groups, pace, fractions", [
    (2, Pace.JUMP, {0: (0, 1), 3: (0, 1), 4: (1, 1), 9: (1, 1)}),
    (2, Pace.RAMP, {0: (0, 0), 1: (0, 0.25), 4: (0, 1), 6: (0.5, 1), 7: (0.75, 1), 8: (1, 1)}),
    (1, Pace.RAMP, {0: (0, 0), 6: (0.75, 0.75), 8: (1, 1)}),
])  # fmt: skip
def test_groups_turn_from_the_top(groups, pace, fractions):
    """Of four layers the last two are ladder layers."""
    turns, topology = ConversionConfig(8, groups, pace), cases.define("hybrid-last-2").topology
    for step, last in fractions.items():
        found = conversion.ladder_fraction(jnp.int32(step), topology=topology, config=turns)
        assert found.tolist() == [1, 1, *last]


@pytest.mark.parametrize("given, said", {
    "lora.targets=all,quary": "did you mean 'query'",
    "lora.rank=2": "lora.rank needs train.start",
    "train.freeze=5 train.start=x": "more than model.num_layers=4",
    "distill.alpha=2": "between 0 and 1",
    "distill.residual=standard": "needs a teacher",
    "distill.teacher=x distill.residual=ladder-fresh": "another mesh would have another teacher",
    "distill.teacher=x distill.residual=no-communication": "another mesh would have another teacher",
    "conversion.steps=5 model.residual=standard": "conversion.steps needs",
    "conversion.steps=1 conversion.groups=3": "too few",
    "conversion.steps=9 train.steps=8": "conversion.steps=9 is more than train.steps=8: .* no ladder layers yet",
    "conversion.steps=8 conversion.groups=5": r"conversion.groups=5 is more than the 4 .* \(allowed: 1 to 4\)",
    "conversion.steps=8 conversion.groups=3 model.ladder_layers=2": r"groups=3 is .* \(allowed: 1 to 2\)",
    "conversion.steps=5 train.sequence_parallel=true": "conversion.steps=5 and train.sequence_parallel excl",
    "distill.teacher=x train.z_loss=1e-4": "train.z_loss",
}.items(), ids=str)  # fmt: skip
def test_settings_that_cannot_be(given, said):
    with refused(said):
        config.load("tiny", overrides=given.split())
