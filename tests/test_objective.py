"""Teachers, frozen layers, low-rank factors, layers that turn to ladder: values and gradients
against dense ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from ladder_jax import config
from ladder_jax.config import START, ConversionConfig, DistillConfig, LoraConfig, Pace, TrainConfig
from ladder_jax.data.packing import Batch
from ladder_jax.errors import UserError
from ladder_jax.retrain import ADAPTERS, Retraining, conversion
from ladder_jax.retrain.lora import LowRank
from ladder_jax.train import step as steps
from ladder_jax.train.gradients import task_gradients
from tests import cases, experts, reference

TWO = dict(num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, vocab_size=61)
TOKENS = cases.tokens((4, 7), vocab=61)
TAU, ALPHA, HIDDEN = 2.0, 0.7, 0.5
SETTINGS = {"last": dict(residual="ladder", ladder_layers="1"), "all": dict(residual="ladder")}


def define(which="last", *, fsdp=1, tensor=2, **more):
    return cases.define("standard", fsdp=fsdp, tensor=tensor, **TWO, **SETTINGS[which], **more)


def original(definition):
    """The same weights as a standard model."""
    standard = dataclasses.replace(
        definition.config, residual="standard", ladder_layers=None, ranks=None
    )
    return dataclasses.replace(definition, config=standard)


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
    mine = (
        mine
        if trained is None
        else jax.device_put(trained, jax.tree.map(lambda a: a.sharding, plan.abstract))
    )
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

    def loss(params, tokens, shape):
        logp = lambda scores: scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        seen, inputs, of_teacher = [], tokens[:, :-1], dataclasses.replace(shape, kind="standard")
        scores = forward(params, inputs, shape, seen)
        ours, theirs = logp(scores / TAU), logp(reference.logits(teacher, inputs, of_teacher) / TAU)
        divergence = (jnp.exp(theirs) * (theirs - ours)).sum(-1)
        entropy = -jnp.take_along_axis(logp(scores), tokens[:, 1:, None], -1)[..., 0]
        mixed = (1 - ALPHA) * entropy + ALPHA * TAU**2 * divergence
        if hidden:
            x, y = (
                reference.streams(p, inputs, s)[0]
                for p, s in ((params, shape), (teacher, of_teacher))
            )
            mixed += hidden * ((x - y) ** 2).mean(-1) / ((y**2).mean(-1) + 1e-6)
        learnt = jnp.broadcast_to(weights, mixed.shape)
        routers = experts.penalties(params["layers"], seen, shape) if shape.experts else 0.0
        return (learnt * mixed).sum() / learnt.sum() + routers

    return loss


@pytest.fixture(scope="module")
def dense():
    """The gradients' mask, and in float64 the loss and gradients of a student that has moved away
    from its teacher.
    """
    definition = define()
    params = cases.parameters(definition)
    student = moved(params, cases.parameters(definition, seed=5))
    learnt = np.random.default_rng(0).integers(0, 2, TOKENS.shape).astype(np.int32)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    function = distillation(wide, weights=learnt[:, 1:].astype(float), hidden=HIDDEN)
    loss, wanted = reference.evaluate(
        function, student, TOKENS, shape(definition, "ladder", (1,)), gradient=True
    )
    return learnt, loss, trained_part(wanted)


@pytest.mark.parametrize(
    "mesh", [dict(fsdp=2, tensor=2), pytest.param(dict(tensor=4), marks=pytest.mark.full)], ids=str
)
def test_distillation_is_the_dense_one(mesh, dense):
    """Frozen embedding and lower layer, a batch with a mask, chunks: values and gradients in
    float64.
    """
    learnt, expected, wanted = dense
    definition = define(**mesh)
    distill = DistillConfig(
        START, alpha=ALPHA, temperature=TAU, hidden_weight=HIDDEN, hidden_every=2
    )
    plan = Retraining(definition, 1, distill=distill, teacher=original(definition))
    batch, trained = (
        Batch(TOKENS, np.ones_like(TOKENS), learnt),
        trained_part(cases.parameters(definition, seed=5)),
    )
    params = cases.parameters(definition)
    ((loss, terms), grads), fixed = compute(plan, params, batch, trained=trained, loss_chunk=8)
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected) < limit
    assert set(terms) == {"cross_entropy", "divergence", "hidden"}
    worst = experts.errors(grads, wanted)
    assert max(jax.tree.leaves(worst)) < limit, worst
    # What is shared lies there once: the teacher holds no more than what trains.
    assert set(fixed["model"]) == {"embedding", "lower"} and set(fixed["teacher"]) == set(trained)


@pytest.fixture(scope="module")
def low_rank():
    """A plan with factors that do something, their gradients, and the model that they are merged
    into.
    """
    definition = define(fsdp=2)
    plan = Retraining(definition, 1, LoraConfig(rank=2, alpha=4.0))
    rng = np.random.default_rng(3)
    factors = jax.tree.map(lambda a: 0.3 * rng.standard_normal(a.shape, np.float32), plan.abstract)
    params = cases.parameters(definition)
    ((loss, _), grads), fixed = compute(plan, params, trained=factors)
    return plan, params, factors, fixed, loss, grads


def test_merged_low_rank_factors_equal_unmerged(low_rank):
    """And their gradients are the chain rule's of the merged matrices' in float64."""
    plan, params, factors, fixed, loss, grads = low_rank
    placed = jax.device_put(factors, jax.tree.map(lambda a: a.sharding, plan.abstract))
    merged = jax.tree.map(np.asarray, plan.exported(placed, fixed))
    changed = jax.tree.map(
        lambda a, b: bool((a != b).any(axis=tuple(range(1, a.ndim))).any()), merged, params
    )
    assert not any(jax.tree.leaves({**changed, "layers": 0})) and changed["layers"]["mlp"]["down"]
    # a frozen layer
    assert not (merged["layers"]["mlp"]["down"][0] != params["layers"]["mlp"]["down"][0]).any()
    of = shape(plan.definition, "ladder", (1,))
    expected, slopes = reference.evaluate(reference.loss, merged, TOKENS, of, gradient=True)
    assert cases.error(loss, expected) < cases.bound(plan.definition.config, passes=2)
    assert check_factors(plan, factors, grads, slopes) == 7


def check_factors(plan, factors, grads, slopes) -> int:
    """The gradients of low-rank factors are the chain rule's of the merged matrices' `slopes`. How
    many matrices.
    """
    dims, slopes = (
        traverse_util.flatten_dict(tree["layers"]) for tree in (plan.definition.dims, slopes)
    )
    factors, grads = (traverse_util.flatten_dict(tree[ADAPTERS]) for tree in (factors, grads))
    limit = cases.bound(plan.definition.config, passes=2)
    for *path, name in factors:
        path = tuple(path)
        of_name = dict(zip(("down", "up"), LowRank.dims(dims[path])))
        (other,) = of_name.keys() - {name}
        slope, beside = slopes[path][plan.frozen_layers :], factors[*path, other]
        if "experts" in path:  # which may be padded
            beside = beside[:, : slope.shape[1]]
        wanted = plan.lora.scale * np.einsum(
            f"{dims[path]},{of_name[other]}->{of_name[name]}", slope, beside
        )
        assert cases.error_but_for_padding(grads[*path, name], wanted) < limit, (path, name)
    return len(factors) // 2


def test_what_is_frozen_has_no_optimizer_state(low_rank):
    plan, *_ = low_rank
    state = steps.abstract_state(plan.definition, config=TrainConfig(), task=plan)
    assert set(state.params) == {"adapters"}
    sizes = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
    assert sizes(state.optimizer) == 2 * sizes(plan.abstract) + 1
    frozen = dataclasses.replace(plan, lora=LoraConfig())
    state = steps.abstract_state(plan.definition, config=TrainConfig(), task=frozen)
    assert set(state.params) == {"layers", "final_norm", "head"}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.params["layers"])} == {1}
    assert sizes(state.optimizer) == 2 * sizes(frozen.abstract) + 1


@pytest.fixture(scope="module")
def turning():
    definition = define("all")
    params = cases.parameters(definition)
    plan = Retraining(definition, conversion=ConversionConfig(steps=4))
    mine, fixed = plan.split(cases.place(params, definition))
    function = jax.jit(task_gradients(plan, config=TrainConfig()))
    return (
        definition,
        params,
        lambda ladder_fraction: function(
            mine, fixed, TOKENS, {"ladder_fraction": jnp.asarray(ladder_fraction, jnp.float32)}
        ),
    )


def test_layers_between_standard_and_ladder(turning):
    """One compiled program; at both ends, in between and of each layer for itself the recurrence,
    in float64.
    """
    definition, params, function = turning
    of = shape(definition, "ladder")

    def loss(params, ladder_fraction):
        scores = reference.logits(params, TOKENS[:, :-1], of, fraction=ladder_fraction)
        picked = jnp.take_along_axis(scores, TOKENS[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(scores, axis=-1) - picked).mean()

    limit = cases.bound(definition.config, passes=2)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        dense = jax.jit(jax.value_and_grad(loss))
        expected = {
            ladder_fraction: dense(wide, jnp.asarray(ladder_fraction))
            for ladder_fraction in ((0.0, 0.0), (0.25, 0.75), (0.0, 1.0), (1.0, 1.0))
        }
        ends = [
            float(reference.loss(wide, TOKENS, shape(definition, kind)))
            for kind in ("standard", "ladder")
        ]
    assert [
        float(expected[ladder_fraction][0]) for ladder_fraction in ((0.0, 0.0), (1.0, 1.0))
    ] == pytest.approx(ends, rel=1e-12)
    for ladder_fraction, (wanted, slopes) in expected.items():
        (found, _), grads = function(ladder_fraction)
        assert cases.error(found, wanted) < limit
        worst = jax.tree.map(cases.error, grads, slopes)
        assert max(jax.tree.leaves(worst)) < limit, worst


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


@pytest.mark.parametrize("name, changes, groups, said", [
    ("standard", {}, 2, "conversion.steps=8 has no ladder layer to turn"),
    ("hybrid-last-2", dict(ladder_layers="0"), 2, "conversion.steps=8 has no ladder layer to turn"),
    ("hybrid-last-2", {}, 3, "conversion.groups=3 is more than the 2 layers that turn"),
])  # fmt: skip
def test_layers_that_cannot_turn(name, changes, groups, said):
    topology = cases.define(name, **changes).topology
    with pytest.raises(UserError, match=said):
        conversion.ladder_fraction(
            jnp.int32(0), topology=topology, config=ConversionConfig(8, groups)
        )


def test_a_fresh_ladder_emulated_on_one_device_is_taught():
    """The teacher computes on the emulated ranks, too; what is accumulated in parts is the same."""
    definition = cases.define("ladder-fresh", ranks=2, **TWO)
    plan = Retraining(definition, distill=DistillConfig(START), teacher=original(definition))
    params = cases.parameters(definition)
    ((loss, _), grads), _ = compute(plan, params, accumulate=2)
    real = dataclasses.replace(plan, definition=cases.define("ladder-fresh", tensor=2, **TWO))
    real = dataclasses.replace(real, teacher=original(real.definition))
    ((wanted, _), others), _ = compute(real, params)
    limit = cases.bound(definition.config, passes=2)
    assert float(wanted) > 0.01 and cases.error(loss, wanted) < limit
    assert max(jax.tree.leaves(jax.tree.map(cases.error, grads, others))) < 4 * limit


@pytest.mark.parametrize("given, said", [
    (["lora.targets=quary"], "did you mean 'query'"),
    (["lora.rank=2"], "lora.rank needs train.start"),
    (["train.freeze=5", "train.start=x"], "more than model.num_layers=4"),
    (["distill.alpha=2"], "between 0 and 1"),
    (["distill.residual=standard"], "needs a teacher"),
    (["conversion.steps=5", "model.residual=standard"], "conversion.steps needs"),
    (["conversion.steps=1", "conversion.groups=3"], "too few"),
    (["conversion.steps=8", "conversion.groups=5"], r"conversion.groups=5 is more than the 4 .* \(allowed: 1 to 4\)"),
    (["conversion.steps=8", "conversion.groups=3", "model.ladder_layers=2"], r"groups=3 is .* \(allowed: 1 to 2\)"),
    (["conversion.steps=5", "train.sequence_parallel=true"], "not with train.sequence_parallel"),
    (["distill.teacher=x", "train.z_loss=1e-4"], "train.z_loss"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_be(given, said):
    with pytest.raises(UserError, match=said):
        config.load("tiny", overrides=given)
