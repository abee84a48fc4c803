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
from ladder_jax.retrain import ADAPTERS, Retraining
from ladder_jax.train.gradients import task_gradients
from tests import cases, covering, rounding

LENGTH, COMMON = 64, 7  # rows so short that attention costs little
ROWS, FEWER = 256, 64  # 16,384 positions, and 4,096 in `make test`
LORA = LoraConfig(rank=6, alpha=16.0)  # 8 / 3 is no bfloat16
SMALL = dict(
    num_layers=2, num_heads=4, num_kv_heads=2, dtype=Dtype.BFLOAT16, residual_dtype=Dtype.BFLOAT16
)
MODELS = {
    "all": ("ladder", dict(biases=Biases.ALL, qk_norm=True), LoraConfig()),
    "tied": ("ladder", dict(tie_embeddings=True), LoraConfig()),
    "lora": ("ladder", dict(tie_embeddings=True), LORA),
    "standard": ("standard", dict(biases=Biases.ALL, qk_norm=True), LoraConfig()),
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
# The same rows and ranks: one reference serves the three.
WHOLE = "data x tensor", "sequence parallel", "fsdp x tensor"
SMALLER = "one device", "accumulate"
SIZED = covering.marked(
    [*itertools.product((*WHOLE, *SMALLER), [FEWER]), *itertools.product(CASES, [ROWS])],
    chosen=[("sequence parallel", FEWER), ("fsdp x tensor", FEWER)],
)


def batch(rows: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 251, (rows, LENGTH + 1)).astype(np.int32)
    return np.where(rng.random(tokens.shape) < 0.4, COMMON, tokens).astype(np.int32)


def plan_of(model: str, mesh: dict) -> Retraining:
    residual, changes, lora = MODELS[model]
    return Retraining(cases.define(residual, **mesh, **SMALL, **changes), lora=lora)


def values(plan: Retraining):
    """(what trains, what is fixed) as NumPy arrays."""
    params = cases.parameters(plan.definition)
    if not plan.lora.rank:
        return params, {}
    rng = np.random.default_rng(5)
    draw = lambda a: (rng.standard_normal(a.shape) * 0.3 / np.sqrt(a.shape[1])).astype(np.float32)
    return {ADAPTERS: jax.tree.map(draw, plan.abstract[ADAPTERS])}, {"model": params}


def found(plan: Retraining, settings: dict, rows: int):
    """The package's gradients."""
    trained, fixed = values(plan)
    place = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda a: a.sharding, like))
    fixed = {"model": place(fixed["model"], plan.definition.abstract)} if plan.lora.rank else fixed
    compute = jax.jit(task_gradients(plan, config=TrainConfig(**settings)))
    return jax.tree.map(
        np.asarray, compute(place(trained, plan.abstract), fixed, batch(rows), {})[1]
    )


@functools.cache
def expected(model: str, parts: int, ranks: int, rows: int):
    """(the exact gradient, samples with rounding) of what trains."""
    plan = plan_of(model, dict(tensor=ranks))
    shape = cases.shape(MODELS[model][0], plan.definition.config, ranks=1)
    shape = dataclasses.replace(
        shape, ranks=ranks, lora=plan.lora.scale if plan.lora.rank else None
    )
    trained, fixed = values(plan)
    if not plan.lora.rank:
        return rounding.gradients(trained, batch(rows), shape, parts=parts)
    groups = trained[ADAPTERS]
    model = fixed["model"]
    beside = {name: {**model["layers"][name], "adapters": groups[name]} for name in groups}
    params = {**model, "layers": {**model["layers"], **beside}}
    of_factors = lambda tree: {
        ADAPTERS: {name: tree["layers"][name]["adapters"] for name in groups}
    }
    exact, samples = rounding.gradients(params, batch(rows), shape, parts=parts)
    return of_factors(exact), [of_factors(sample) for sample in samples]


def ratios(gradients, exact, samples) -> dict[str, float]:
    """Each parameter's error, in root mean squares of the samples' errors; of tables, rows of their
    own beside.
    """
    measured = {}
    for (path, g), e, *several in zip(
        jax.tree_util.tree_leaves_with_path(gradients),
        jax.tree.leaves(exact),
        *map(jax.tree.leaves, samples),
    ):
        name, stacked = jax.tree_util.keystr(path), "layers" in str(path) or ADAPTERS in str(path)
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


def ratio(error, *samples) -> float:
    norm = np.linalg.norm
    return float(norm(error) / np.sqrt(np.mean([norm(sample) ** 2 for sample in samples])))


@pytest.mark.parametrize("case, rows", SIZED)
def test_gradients_are_within_what_rounding_may_do(case, rows):
    model, mesh, settings, parts, ranks = CASES[case]
    exact, samples = expected(model, parts, ranks, rows)
    measured = ratios(found(plan_of(model, mesh), settings, rows), exact, samples)
    beyond = {name: value for name, value in measured.items() if not value < rounding.STUDENT}
    assert not beyond and len(measured) > 14, beyond


def test_the_bound_is_a_few_roundings():
    """Of each matrix and of the common token's row: else it would say nothing."""
    exact, samples = expected("all", 2, 4, FEWER)
    row = lambda tree: tree["embedding"]["table"][COMMON]
    matrices = lambda tree: [
        a for part in ("attention", "mlp") for a in jax.tree.leaves(tree["layers"][part])
    ]
    for e, *several in zip(
        [row(exact), *matrices(exact)], *([row(s), *matrices(s)] for s in samples)
    ):
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


def relative(actual, wanted) -> float:
    return float(np.linalg.norm(np.asarray(actual, np.float64) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_weights_gradient_is_rounded_once_at_most(stored):
    """A weight's: 16,384 float32 additions, whose errors are no more than 2^14 2^-24 of what is
    added; and one 2^-8.
    """
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.standard_normal((64, 256, n)) + 0.5, jnp.bfloat16) for n in (32, 48))
    _, pull_back = jax.vjp(
        lambda w: quantized.einsum("BTD,DF->BTF", x, w), jnp.ones((32, 48), stored)
    )
    wide_x, wide_dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    wanted = np.einsum("btd,btf->df", wide_x, wide_dy)
    added = np.linalg.norm(np.einsum("btd,btf->df", abs(wide_x), abs(wide_dy))) / np.linalg.norm(
        wanted
    )
    once = 0 if stored == jnp.float32 else 2.0**-8
    assert relative(jax.jit(pull_back)(dy)[0], wanted) < 2.0**-10 * added + once


def test_a_gathered_tables_gradient_is_rounded_once():
    indices = jnp.zeros((64, 256), jnp.int32).at[:, ::2].set(3)
    dy = jnp.asarray(np.random.default_rng(0).standard_normal((64, 256, 32)) + 0.5, jnp.bfloat16)
    _, pull_back = jax.vjp(
        lambda t: quantized.rows(t, indices, dtype=jnp.bfloat16), jnp.ones((8, 32), jnp.bfloat16)
    )
    wanted = np.zeros((8, 32))
    np.add.at(wanted, np.asarray(indices), np.asarray(dy, np.float64))
    assert relative(jax.jit(pull_back)(dy)[0], wanted) < 2.0**-8 + 2.0**-10 * 2


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
