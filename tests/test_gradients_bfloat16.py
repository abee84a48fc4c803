"""Gradients in bfloat16 against the float64 reference, of every parameter, where one token is 40 %
of all positions.

The bound comes from bfloat16's unit roundoff and the places that round: see tests/rounding.py.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from ladder_jax.config import Biases, CollectiveMatmul, Dtype, Loop, LoraConfig, Remat, TrainConfig
from ladder_jax.nn import quantized
from ladder_jax.nn.grouped import Groups, grouped_matmul
from ladder_jax.retrain import ADAPTERS, Retraining
from ladder_jax.train.gradients import task_gradients
from tests import cases, covering, experts, rounding

LENGTH, COMMON = 64, 7  # rows so short that attention costs little
ROWS, FEWER = 256, 64  # 16,384 positions, and 4,096 in `make test`
LORA = LoraConfig(rank=6, alpha=16.0)  # 8 / 3 is no bfloat16
SMALL = dict(
    num_layers=2, num_heads=4, num_kv_heads=2, dtype=Dtype.BFLOAT16, residual_dtype=Dtype.BFLOAT16
)
MOE = dict(experts=4, top_k=2, expert_width=16, shared_width=16, shared_gate=True)
MODELS = {
    "all": ("ladder", dict(biases=Biases.ALL, qk_norm=True), LoraConfig()),
    "tied": ("ladder", dict(tie_embeddings=True), LoraConfig()),
    "lora": ("ladder", dict(tie_embeddings=True), LORA),
    "standard": ("standard", dict(biases=Biases.ALL, qk_norm=True), LoraConfig()),
    "experts": ("farskip", dict(moe=MOE), LoraConfig()),
    "experts, lora": ("farskip", dict(moe=MOE), LORA),
}
RINGS = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
# model, mesh, further settings; in how many parts a batch is computed, for itself each, and on how
# many ranks a part
CASES = {
    "one device": ("all", {}, {}, 1, 1),
    "data x tensor": ("all", dict(data=2, tensor=4), {}, 2, 4),
    "sequence parallel": ("all", dict(data=2, tensor=4), dict(sequence_parallel=True), 2, 4),
    "fsdp x tensor": ("all", dict(fsdp=2, tensor=4), {}, 2, 4),
    "accumulate": ("tied", {}, dict(accumulate=4), 4, 1),
    "lora": ("lora", dict(fsdp=2, tensor=4), {}, 2, 4),
    "rings": ("standard", dict(data=2, tensor=4), RINGS, 2, 4),
    "fsdp x tensor, tied": ("tied", dict(fsdp=2, tensor=4), {}, 2, 4),
}
EXPERTS = {
    name: (name, {}, dict(load_balance=0.0, router_z_loss=0.0), 1, 1)
    for name in ("experts", "experts, lora")
}
# The same rows and ranks: one reference serves the two.
SIZED = covering.marked(
    [*itertools.product(EXPERTS, [FEWER]), *itertools.product(CASES, [ROWS])],
    chosen=[("sequence parallel", FEWER), ("fsdp x tensor", FEWER)],
)


def batch(rows):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 251, (rows, LENGTH + 1)).astype(np.int32)
    return np.where(rng.random(tokens.shape) < 0.4, COMMON, tokens).astype(np.int32)


def plan_of(model, mesh):
    residual, changes, lora = MODELS[model]
    define = experts.define if "moe" in changes else cases.define
    return Retraining(define(residual, **mesh, **SMALL, **changes), lora=lora)


def values(plan):
    """(what trains, what is fixed) as NumPy arrays."""
    params = cases.parameters(plan.definition)
    if not plan.lora.rank:
        return params, {}
    rng = np.random.default_rng(5)
    draw = lambda a: (rng.standard_normal(a.shape) * 0.3 / np.sqrt(a.shape[-2])).astype(np.float32)
    return {ADAPTERS: jax.tree.map(draw, plan.abstract[ADAPTERS])}, {"model": params}


def found(plan, settings, rows):
    """The package's gradients."""
    trained, fixed = values(plan)
    fixed = {"model": cases.place(fixed["model"], plan.definition)} if plan.lora.rank else fixed
    compute = jax.jit(task_gradients(plan, config=TrainConfig(**settings)))
    return jax.tree.map(np.asarray, compute(cases.place(trained, plan), fixed, batch(rows), {})[1])


@functools.cache
def expected(model, parts, ranks, rows):
    """(the exact gradient, samples with rounding) of what trains."""
    plan = plan_of(model, dict(tensor=ranks))
    residual, config = MODELS[model][0], plan.definition.config
    shape = (
        experts.shape(residual, config) if config.moe else cases.shape(residual, config, ranks=1)
    )
    shape = dataclasses.replace(
        shape, ranks=ranks, lora=plan.lora.scale if plan.lora.rank else None
    )
    trained, fixed = values(plan)
    if not plan.lora.rank:
        return rounding.gradients(trained, batch(rows), shape, parts=parts)
    groups = trained[ADAPTERS]
    params = fixed["model"]
    beside = {name: {**params["layers"][name], "adapters": groups[name]} for name in groups}
    params = {**params, "layers": {**params["layers"], **beside}}
    of_factors = lambda tree: {
        ADAPTERS: {name: tree["layers"][name]["adapters"] for name in groups}
    }
    exact, samples = rounding.gradients(params, batch(rows), shape, parts=parts)
    return of_factors(exact), [of_factors(sample) for sample in samples]


def ratios(gradients, exact, samples):
    """Each parameter's error, in root mean squares of the samples' errors; of tables, rows of their
    own beside.
    """
    measured = {}
    for (path, g), e, *several in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(exact),
        *map(jax.tree.leaves, samples),
    ):
        name = jax.tree_util.keystr(path)
        stacked = "layers" in str(path) or ADAPTERS in str(path)
        wide = [np.asarray(a, np.float64) for a in (g, *several)]
        for layer in range(len(e)) if stacked else [...]:
            measured[f"{name} {layer}"] = ratio(*(np.ravel(a[layer] - e[layer]) for a in wide))
        if name.endswith("['table']"):
            rows = np.flatnonzero(np.abs(e).max(1))
            assert all(not np.delete(a, rows, axis=0).any() for a in wide)
            measured.update(
                {f"{name} row {row}": ratio(*(a[row] - e[row] for a in wide)) for row in rows}
            )
    return measured


def ratio(error, *samples):
    norm = np.linalg.norm
    return float(norm(error) / np.sqrt(np.mean([norm(sample) ** 2 for sample in samples])))


@pytest.mark.parametrize("case, rows", SIZED)
def test_gradients_are_within_what_rounding_may_do(case, rows):
    model, mesh, settings, parts, ranks = (CASES | EXPERTS)[case]
    exact, samples = expected(model, parts, ranks, rows)
    measured = ratios(found(plan_of(model, mesh), settings, rows), exact, samples)
    # Whether one of a row's few tokens passes another expert is no sum of roundings.
    if model == "experts":
        measured = {name: value for name, value in measured.items() if " row " not in name}
    beyond = {name: value for name, value in measured.items() if not value < rounding.STUDENT}
    assert not beyond and len(measured) > 14, beyond


def test_the_bound_is_a_few_roundings():
    """Of each matrix and of the common token's row: else it would say nothing."""
    looked_at = lambda tree: [
        tree["embedding"]["table"][COMMON],
        *jax.tree.leaves([tree["layers"][part] for part in ("attention", "mlp")]),
    ]
    exact, samples = expected("all", 2, 4, FEWER)
    for e, *several in zip(*map(looked_at, (exact, *samples))):
        spread = np.sqrt(np.mean([np.linalg.norm(s - e) ** 2 for s in several])) / np.linalg.norm(e)
        assert 2.0**-10 < spread < 4 * 2.0**-8


def test_the_bound_sees_a_table_that_is_cast_before_it_is_read(monkeypatch):
    cast = lambda table, indices, *, dtype: jnp.take(table.astype(dtype), indices, axis=0)
    monkeypatch.setattr(quantized, "rows", cast)
    measured = ratios(
        found(plan_of("all", dict(tensor=4)), {}, FEWER), *expected("all", 2, 4, FEWER)
    )
    name = "['embedding']['table']"
    assert measured[f"{name} row {COMMON}"] > 4 * rounding.STUDENT < measured[f"{name} {...}"]
    assert (
        max(value for key, value in measured.items() if not key.startswith(name)) < rounding.STUDENT
    )


# 16,384 positions' experts, or rows of a table; the last expert's are nobody's
CHOSEN = np.repeat(np.arange(5), [9000, 0, 5000, 1000, 1384])
IS_CHOSEN = CHOSEN[:, None] == np.arange(5)


def of_experts(x, weight):
    places = jnp.arange(len(CHOSEN))
    sizes = jnp.asarray(np.bincount(CHOSEN)[:4], jnp.int32)
    return grouped_matmul(x, weight, Groups(places, places, sizes))


# a product with x [R, D]; the weight's shape; the sum that its gradient is, of what and the
# output's gradient
PRODUCTS = {
    "matmul": (
        lambda x, weight: quantized.einsum("BTD,DF->BTF", x[None], weight)[0],
        ((32, 48), "rd,rf->df", lambda x: x),
    ),
    "table": (
        lambda x, weight: quantized.rows(weight, CHOSEN, dtype=jnp.bfloat16),
        ((5, 48), "rv,rd->vd", lambda x: IS_CHOSEN),
    ),
    "experts": (
        of_experts,
        ((4, 32, 48), "erd,rf->edf", lambda x: IS_CHOSEN.T[:4, :, None] * x),
    ),
    "exchanged experts": (
        lambda x, weight: quantized.einsum("ERM,EMD->RED", x.reshape(4, -1, 32), weight),
        ((4, 32, 48), "erd,ref->edf", lambda x: x.reshape(4, -1, 32)),
    ),
}


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_weights_gradient_is_rounded_once_at_most(product, stored):
    """16,384 float32 additions, whose errors are no more than 2^14 2^-24 of what is added; and one
    2^-8.
    """
    (multiply, (shape, letters, factor)), rng = PRODUCTS[product], np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) + 0.5, jnp.bfloat16)
    x = draw(len(CHOSEN), 32)
    out, pull_back = jax.vjp(lambda weight: multiply(x, weight), jnp.ones(shape, stored))
    dy = draw(*out.shape)
    of_x = np.float64(factor(np.asarray(x, np.float64)))
    of_dy = np.asarray(dy, np.float64)
    wanted, added = (np.einsum(letters, size(of_x), size(of_dy)) for size in (np.array, np.abs))
    once = 0 if stored == jnp.float32 else 2.0**-8
    error = np.linalg.norm(np.asarray(jax.jit(pull_back)(dy)[0], np.float64) - wanted)
    assert error < 2.0**-10 * np.linalg.norm(added) + once * np.linalg.norm(wanted)


SUMS = {
    "reduce_sum",
    "cumsum",
    "scatter-add",
    "add",
    "add_any",
    "dot_general",
    "psum",
    "psum_invariant",
    "reduce_scatter",
}
EACH = 3  # rows of a batch that a device computes at once: a size that no other dimension has


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        is_jaxpr = lambda leaf: isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)
        for value in filter(
            is_jaxpr, jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
        ):
            yield from equations(getattr(value, "jaxpr", value))


REMATS = Remat.NONE, Remat.FULL
TRACED = covering.rows(CASES, REMATS, Loop, pairs=[(1, 2)], even=[1, 2])


@pytest.mark.parametrize("case, remat, loop", TRACED)
def test_no_program_sums_over_positions_in_bfloat16(case, remat, loop):
    """Whatever adds in bfloat16, in a matmul or between ranks, keeps a batch's rows apart: as
    traced, on every mesh.
    """
    model, mesh, settings, *_ = CASES[case]
    plan = plan_of(model, mesh)
    rows = EACH * settings.get("accumulate", 1) * mesh.get("data", 1) * mesh.get("fsdp", 1)
    fixed = {"model": plan.definition.abstract} if plan.lora.rank else {}
    tokens = jax.ShapeDtypeStruct((rows, 21), jnp.int32)
    gradients = task_gradients(plan, config=TrainConfig(loop=loop, remat=remat, **settings))
    program = jax.make_jaxpr(gradients)(plan.abstract, fixed, tokens, {})
    results = [
        (e, v.aval) for e in equations(program.jaxpr) if e.primitive.name in SUMS for v in e.outvars
    ]
    low = [(e, aval) for e, aval in results if aval.dtype == jnp.bfloat16]
    assert len(low) > 20
    wrong = [
        f"{e.primitive.name} {aval.shape} {e.source_info.name_stack}"
        for e, aval in low
        if EACH not in aval.shape
    ]
    assert not wrong, wrong
