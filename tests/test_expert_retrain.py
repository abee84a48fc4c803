"""Experts in retraining: teachers, frozen layers, layers that turn, low-rank factors; against a
dense float64 loop.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ladder_jax import config, nn, parallel
from ladder_jax.config import START, ConversionConfig, DistillConfig
from ladder_jax.retrain import Retraining, sources
from tests import cases, experts, reference
from tests.covering import full
from tests.refusals import refused
from tests.test_objective import (
    DISTILL,
    LORA,
    check,
    check_low_rank,
    distillation,
    moved,
    original,
    trained_part,
)

FROZEN = 1
FRACTION = (0.25, 0.5, 0.75)


FULL = pytest.mark.full
LOSSES = dict(load_balance=experts.LOAD_BALANCE, router_z_loss=experts.Z_LOSS)
ROWS = [
    ("hybrid-farskip", "shared", dict(data=2, tensor=2), FRACTION[:2], 2),
    full("hybrid-farskip", "shared", dict(data=2, tensor=4), FRACTION, 2),
    full("farskip", "ungated", dict(fsdp=2, tensor=2), FRACTION, 1),
    full("farskip", "shared", dict(tensor=2), (0.0, 0.0, 0.0), 1),
    full("farskip", "shared", dict(fsdp=2, tensor=4), (1.0, 1.0, 1.0), 2),
    full("ladder", "routed", dict(data=2, tensor=2), FRACTION, 2),
    full("hybrid-ladder", "shared", dict(fsdp=4), FRACTION, 1),
]


@pytest.mark.parametrize("name, kind, mesh, fraction, parts", ROWS)
def test_distillation_of_turning_layers(name, kind, mesh, fraction, parts):
    """With a frozen embedding and lower layer; the routers' losses are those of the whole batch."""
    definition = experts.define(name, kind, **mesh, num_layers=len(fraction))
    plan = Retraining(
        definition,
        FROZEN,
        distill=DISTILL,
        conversion=ConversionConfig(steps=4),
        teacher=original(definition),
    )
    of = experts.shape(name, definition.config)
    if name == "hybrid-farskip":  # of two layers or three
        of = replace(of, ladder=(len(fraction) - 1,))
    params = cases.parameters(definition)
    taught = distillation(params, forward=functools.partial(reference.logits, fraction=fraction))
    student = moved(params, cases.parameters(definition, seed=5))
    settings = dict(accumulate=parts, scheduled={"ladder_fraction": jnp.float32(fraction)})
    tokens, settings = experts.tokens(), LOSSES | settings
    terms, _ = check(plan, taught, of, student, tokens, part=trained_part, **settings)
    assert {
        "cross_entropy",
        "divergence",
        "expert_load",
        "dead_experts",
        "router_entropy",
    } <= plan.measured(terms, settings["scheduled"]).keys()
    assert float(jnp.sum(terms["counts"])) == pytest.approx(
        len(fraction) * definition.config.moe.top_k
    )


@pytest.mark.parametrize("taught", [False, full(True)])
def test_a_model_with_dense_layers_is_trained_further(taught):
    """All its weights, on the data or by a standard teacher."""
    definition = experts.define("farskip", "shared", tensor=2, dense_layers=1, num_layers=2)
    plan, loss = Retraining(definition), experts.loss
    if taught:
        plan = replace(plan, distill=DISTILL, teacher=original(definition))
        loss = distillation(cases.parameters(definition))
    of = experts.shape("farskip", definition.config)
    check(plan, loss, of, cases.parameters(definition, seed=5), experts.tokens(), **LOSSES)


def test_a_teachers_routers_stay_float32():
    """As the student's: what they choose must not differ. Its other matrices are in the compute
    dtype.
    """
    definition = experts.define("farskip", "ungated", dtype="bfloat16")
    params = cases.parameters(definition)
    plan = Retraining(definition, distill=DistillConfig(START), teacher=original(definition))
    trained, frozen = plan.split(cases.place(params, definition))
    mine = trained["layers"]["mlp"]
    its = frozen["teacher"]["layers"]["mlp"]
    for name in ("router", "router_bias"):
        assert its[name].dtype == jnp.float32 and (its[name] == mine[name]).all(), name
    assert {a.dtype for a in jax.tree.leaves((its["experts"], its["shared"]))} == {
        jnp.dtype("bfloat16")
    }


ADAPTED = [
    ("ladder", "routed", dict(tensor=4), {}),
    full("farskip", "shared", dict(fsdp=2, tensor=2), {}),
    full("farskip", "ungated", dict(fsdp=2, tensor=4), dict(experts="exchange")),
    full("hybrid-ladder", "shared", dict(data=2, tensor=2), dict(experts="exchange")),
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
    plan = Retraining(definition, FROZEN, LORA)
    of = experts.shape(name, definition.config)
    settings = dict(load_balance=0.0, router_z_loss=0.0, sequence_parallel=bool(form))
    groups = 1 + (kind != "routed")  # routed experts, and a shared one
    check_low_rank(plan, experts.tokens(), of, count=4 + 3 * groups, **settings)


@pytest.mark.parametrize(
    "after, before",
    {
        1.25: None,
        None: 1.25,
        3.0: 1.25,
    }.items(),
)
def test_a_capacity_may_change(before, after):
    """It says how training computes; all other fields of experts say which parameters there are, or
    what they mean.
    """
    theirs, ours = (
        experts.model(moe={**experts.KINDS["shared"], "capacity": one}) for one in (before, after)
    )
    for name in ("train.start='x'", "distill.teacher='x'"):
        sources.check_shape(name, theirs, ours)
    other = replace(ours, moe=replace(ours.moe, top_k=1))
    with refused("^x: the checkpoint has model.moe.top_k=2, and this run model.moe.top_k=1$"):
        sources.check_shape("x", theirs, other)
    with refused("^x: the checkpoint has model.moe.experts=6, and this run .*experts=None$"):
        sources.check_shape("x", theirs, replace(ours, moe=None))


DENSE = "model.moe.dense_layers=1", "model.residual=farskip"


@pytest.mark.parametrize("said, given", {
    "ladder-fresh or farskip, not 'parallel-ladder'": ["model.residual=parallel-ladder", "conversion.steps=4"],
    "freeze=1 and .*dense_layers exclude each other: .* all alike": ["train.freeze=1", "train.start=x", *DENSE],
    "lora.rank=2 and model.moe.dense_layers exclude": ["lora.rank=2", "lora.targets=query", "train.start=x", *DENSE],
    "conversion.steps=4 and model.moe.dense_layers exclude": ["conversion.steps=4", *DENSE],
    "hidden_weight=0.5 and .*dense_layers exclude": ["distill.hidden_weight=0.5", "distill.teacher=x", *DENSE],
}.items(), ids=str)  # fmt: skip
def test_settings_that_cannot_be(given, said):
    with refused(said):
        config.load("tiny-moe", overrides=given)
