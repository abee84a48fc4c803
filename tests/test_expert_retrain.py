"""Experts in retraining: teachers, frozen layers, layers that turn, low-rank factors; against a
dense float64 loop.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import config, nn, parallel
from ladder_jax.config import START, ConversionConfig, DistillConfig, LoraConfig, TrainConfig
from ladder_jax.errors import UserError
from ladder_jax.retrain import ADAPTERS, Retraining, sources
from ladder_jax.train.gradients import task_gradients
from tests import cases, experts, reference, rounding, test_gradients_bfloat16
from tests.test_objective import (
    ALPHA,
    TAU,
    check_factors,
    compute,
    distillation,
    moved,
    original,
    trained_part,
)

FROZEN = 1
FRACTION = (0.25, 0.5, 0.75)


FULL = pytest.mark.full
LADDER = {("hybrid-farskip", 2): (1,), ("hybrid-farskip", 3): (2,), ("hybrid-ladder", 3): (1,)}
ROWS = [
    ("hybrid-farskip", "shared", dict(data=2, tensor=2), FRACTION[:2], 2),
    pytest.param("hybrid-farskip", "shared", dict(data=2, tensor=4), FRACTION, 2, marks=FULL),
    pytest.param("farskip", "ungated", dict(fsdp=2, tensor=2), FRACTION, 1, marks=FULL),
    pytest.param("farskip", "shared", dict(tensor=2), (0.0, 0.0, 0.0), 1, marks=FULL),
    pytest.param("farskip", "shared", dict(fsdp=2, tensor=4), (1.0, 1.0, 1.0), 2, marks=FULL),
    pytest.param("ladder", "routed", dict(data=2, tensor=2), FRACTION, 2, marks=FULL),
    pytest.param("hybrid-ladder", "shared", dict(fsdp=4), FRACTION, 1, marks=FULL),
]


@pytest.mark.parametrize("name, kind, mesh, fraction, parts", ROWS)
def test_distillation_of_turning_layers(name, kind, mesh, fraction, parts):
    """With a frozen embedding and lower layer: loss and gradients, the routers' losses of the whole
    batch included.
    """
    layers = dict(num_layers=len(fraction))
    definition = experts.define(name, kind, **mesh, **layers)
    distill = DistillConfig(START, alpha=ALPHA, temperature=TAU)
    turns = ConversionConfig(steps=4)
    plan = Retraining(
        definition, FROZEN, distill=distill, conversion=turns, teacher=original(definition)
    )
    settings = dict(
        load_balance=experts.LOAD_BALANCE, router_z_loss=experts.Z_LOSS, accumulate=parts
    )
    settings |= dict(scheduled={"ladder_fraction": jnp.float32(fraction)})
    trained = trained_part(cases.parameters(definition, seed=5))
    params = cases.parameters(definition)
    ((loss, terms), grads), _ = compute(plan, params, experts.tokens(), trained=trained, **settings)

    one = experts.define(name, kind, **layers)
    params = cases.parameters(one)
    student = moved(params, cases.parameters(one, seed=5))
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    ladder = None if one.config.ladder_layers is None else LADDER[name, len(fraction)]
    shape = dataclasses.replace(experts.shape(name, one.config), ladder=ladder)
    taught = distillation(wide, forward=functools.partial(reference.logits, fraction=fraction))
    expected, wanted = reference.evaluate(taught, student, experts.tokens(), shape, gradient=True)
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected) < limit
    errors = experts.errors(grads, trained_part(wanted))
    assert max(jax.tree.leaves(errors)) < limit, errors
    measured = plan.measured(terms, settings["scheduled"])
    assert {
        "cross_entropy",
        "divergence",
        "expert_load",
        "dead_experts",
        "router_entropy",
    } <= measured.keys()
    assert float(jnp.sum(terms["counts"])) == pytest.approx(
        len(fraction) * definition.config.moe.top_k
    )


@pytest.mark.parametrize("taught", [False, pytest.param(True, marks=FULL)])
def test_a_model_with_dense_layers_is_trained_further(taught):
    """All its weights, on the data or by a standard teacher."""
    definition = experts.define("farskip", "shared", tensor=2, dense_layers=1, num_layers=2)
    params, weights = cases.parameters(definition), cases.parameters(definition, seed=5)
    teaching = dict(
        distill=DistillConfig(START, alpha=ALPHA, temperature=TAU), teacher=original(definition)
    )
    plan = Retraining(definition, **(teaching if taught else {}))
    losses = dict(load_balance=experts.LOAD_BALANCE, router_z_loss=experts.Z_LOSS)
    ((loss, _), grads), _ = compute(plan, params, experts.tokens(), trained=weights, **losses)
    one = experts.define("farskip", "shared", dense_layers=1, num_layers=2)
    shape, wide = (
        experts.shape("farskip", one.config),
        jax.tree.map(np.float64, cases.parameters(one)),
    )
    of, student = distillation(wide) if taught else experts.loss, cases.parameters(one, seed=5)
    expected, wanted = reference.evaluate(of, student, experts.tokens(), shape, gradient=True)
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected) < limit
    errors = experts.errors(grads, wanted)
    assert max(jax.tree.leaves(errors)) < limit, errors


def test_a_teachers_routers_stay_float32():
    """As the student's: what they choose must not differ. Its other matrices are in the compute
    dtype.
    """
    definition = experts.define("farskip", "ungated", dtype="bfloat16")
    params = cases.parameters(definition)
    plan = Retraining(definition, distill=DistillConfig(START), teacher=original(definition))
    trained, frozen = plan.split(cases.place(params, definition))
    mine, its = trained["layers"]["mlp"], frozen["teacher"]["layers"]["mlp"]
    for name in ("router", "router_bias"):
        assert its[name].dtype == jnp.float32 and (its[name] == mine[name]).all(), name
    assert {a.dtype for a in jax.tree.leaves((its["experts"], its["shared"]))} == {
        jnp.dtype("bfloat16")
    }


ADAPTED = [
    ("ladder", "routed", dict(tensor=4), {}),
    pytest.param("farskip", "shared", dict(fsdp=2, tensor=2), {}, marks=FULL),
    pytest.param(
        "farskip", "ungated", dict(fsdp=2, tensor=4), dict(experts="exchange"), marks=FULL
    ),
    pytest.param(
        "hybrid-ladder", "shared", dict(data=2, tensor=2), dict(experts="exchange"), marks=FULL
    ),
]


@pytest.mark.parametrize("name, kind, mesh, form", ADAPTED)
def test_low_rank_factors(name, kind, mesh, form):
    """Merged they compute the same, and their gradients are the chain rule's of the merged
    matrices'.
    """
    moe = experts.KINDS[kind]
    moe = {**moe, "capacity": moe["experts"] / moe["top_k"]} if form else moe  # drops no row
    definition = nn.define(
        experts.model(name, kind, moe=moe, num_layers=2), mesh=parallel.make_mesh(**mesh), **form
    )
    plan = Retraining(definition, FROZEN, LoraConfig(rank=2, alpha=4.0))
    rng = np.random.default_rng(3)
    padded = jax.tree.map(lambda a: 0.3 * rng.standard_normal(a.shape, np.float32), plan.abstract)
    routed = padded["adapters"]["mlp"]["experts"]
    padded["adapters"]["mlp"]["experts"] = jax.tree.map(
        lambda a: a * (np.arange(a.shape[1]) < 6)[:, None, None], routed
    )
    settings = dict(load_balance=0.0, router_z_loss=0.0, sequence_parallel=bool(form))
    params = cases.parameters(definition)
    ((loss, _), grads), frozen = compute(plan, params, experts.tokens(), trained=padded, **settings)
    factors = jax.device_put(padded, jax.tree.map(lambda a: a.sharding, plan.abstract))
    merged = jax.tree.map(np.asarray, plan.exported(factors, frozen))
    merged["layers"]["mlp"]["experts"] = jax.tree.map(
        lambda a: a[:, :6], merged["layers"]["mlp"]["experts"]
    )
    shape = experts.shape(name, definition.config)
    expected, slopes = reference.evaluate(
        reference.loss, merged, experts.tokens(), shape, gradient=True
    )
    assert cases.error(loss, expected) < cases.bound(definition.config, passes=2)
    groups = 1 + ("shared" in merged["layers"]["mlp"])
    assert check_factors(plan, padded, grads, slopes) == 4 + 3 * groups


@pytest.mark.full
def test_bfloat16_gradients_of_low_rank_factors():
    """As tests/test_experts.py of all parameters."""
    bfloat16 = dict(
        dtype="bfloat16", residual_dtype="bfloat16", num_layers=2, num_heads=4, num_kv_heads=2
    )
    moe = dict(experts=4, top_k=2, expert_width=16, shared_width=16, shared_gate=True)
    plan = Retraining(
        experts.define("farskip", moe=moe, **bfloat16), lora=LoraConfig(rank=6, alpha=16.0)
    )
    definition, batch = plan.definition, cases.tokens((32, 65))
    params, rng = cases.parameters(definition), np.random.default_rng(5)
    draw = lambda a: (rng.standard_normal(a.shape) * 0.3 / np.sqrt(a.shape[-2])).astype(np.float32)
    factors = jax.tree.map(draw, plan.abstract[ADAPTERS])
    beside = {name: {**params["layers"][name], "adapters": factors[name]} for name in factors}
    shape = dataclasses.replace(experts.shape("farskip", definition.config), lora=plan.lora.scale)
    whole = {**params, "layers": {**params["layers"], **beside}}
    exact, samples = rounding.gradients(whole, batch, shape, parts=1)
    of_factors = lambda tree: {
        ADAPTERS: {name: tree["layers"][name]["adapters"] for name in factors}
    }
    compute = jax.jit(task_gradients(plan, config=TrainConfig(load_balance=0.0, router_z_loss=0.0)))
    _, found = compute({ADAPTERS: factors}, {"model": cases.place(params, definition)}, batch, {})
    found, samples = jax.tree.map(np.asarray, found), [of_factors(sample) for sample in samples]
    measured = test_gradients_bfloat16.ratios(found, of_factors(exact), samples)
    beyond = {name: value for name, value in measured.items() if not value < rounding.STUDENT}
    assert not beyond and len(measured) == 2 * 2 * 10, beyond  # layers, factors and matrices


@pytest.mark.parametrize("before, after", [(None, 1.25), (1.25, None), (1.25, 3.0)])
def test_a_capacity_may_change(before, after):
    """It says how training computes; all other fields of experts say which parameters there are, or
    what they mean.
    """
    theirs, ours = (
        experts.model(moe={**experts.KINDS["shared"], "capacity": one}) for one in (before, after)
    )
    for name in ("train.start='x'", "distill.teacher='x'"):
        sources.check_shape(name, theirs, ours)
    other = dataclasses.replace(ours, moe=dataclasses.replace(ours.moe, top_k=1))
    with pytest.raises(
        UserError, match="^x: the checkpoint has model.moe.top_k=2, and this run model.moe.top_k=1$"
    ):
        sources.check_shape("x", theirs, other)
    with pytest.raises(
        UserError, match="^x: the checkpoint has model.moe.experts=6, and this run .*experts=None$"
    ):
        sources.check_shape("x", theirs, dataclasses.replace(ours, moe=None))


DENSE = "model.moe.dense_layers=1", "model.residual=farskip"


@pytest.mark.parametrize("given, said", [
    (["model.residual=parallel-ladder", "conversion.steps=4"], "ladder-fresh or farskip, not 'parallel-ladder'"),
    (["train.freeze=1", "train.start=x", *DENSE], "train.freeze=1 is for layers that are all alike: not with .*=1"),
    (["lora.rank=2", "lora.targets=query", "train.start=x", *DENSE], "lora.rank=2 is for layers that are all alike"),
    (["conversion.steps=4", *DENSE], "conversion.steps=4 is for layers that are all alike"),
    (["distill.hidden_weight=0.5", "distill.teacher=x", *DENSE], "hidden_weight=0.5 is for layers that are all alike"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_be(given, said):
    with pytest.raises(UserError, match=said):
        config.load("tiny-moe", overrides=given)
