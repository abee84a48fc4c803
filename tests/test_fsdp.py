"""Weights gathered for one layer at a time: what is kept for the backward pass, and beside low-rank
factors.

Its numbers on every mesh are held to the reference's in test_meshes.py, its schedules in
tests/audit/test_sharded.py.
"""

import jax
import pytest

from ladder_jax import nn
from ladder_jax.config import Execution, Loop, LoraConfig, Remat, TrainConfig
from ladder_jax.parallel import all_reduce, collectives, on_mesh, pvary
from ladder_jax.retrain import Retraining
from ladder_jax.train.gradients import task_gradients
from tests import cases, covering
from tests.test_meshes import LENGTH, ROWS

LOOPS = covering.marked([(Loop.UNROLLED,)], chosen=[(Loop.SCAN,)])


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL, Remat.SAVE_MATMULS])
@pytest.mark.parametrize("loop", Loop)
def test_no_whole_matrix_is_kept_for_the_backward_pass(loop, remat, monkeypatch):
    """Of what the layers' loop gives its backward pass nothing has the shape of a gathered
    matrix.
    """
    definition = cases.define("ladder", num_layers=2, fsdp=4, tensor=2)
    whole = set()
    unsharded = collectives._unsharded

    def watch(array, dims, dtype):
        gathered = unsharded(array, dims, dtype)
        if dims != "LD":
            whole.add(gathered.shape)
        return gathered

    monkeypatch.setattr(collectives, "_unsharded", watch)
    kept = []

    def local(params, tokens):
        # as a training step does
        params = jax.tree.map(lambda a: pvary(a, definition.layout.all_axes), params)
        run = nn.ForwardPass(definition, tokens.shape, execution=Execution(loop=loop, remat=remat))
        state, _ = run.embed(params, tokens)
        through = lambda stack: run.layers(state, params={"layers": stack})[0].residual
        x, pull_back = jax.vjp(through, params["layers"])
        kept.extend(a.shape for a in jax.tree.leaves(pull_back))
        return all_reduce(x.sum(), definition.layout.batch)

    dims = dict(in_dims=(definition.dims, "BT"), out_dims="")
    tokens = jax.ShapeDtypeStruct(
        (ROWS, LENGTH), "int32", sharding=definition.layout.sharding("BT")
    )
    jax.eval_shape(on_mesh(local, layout=definition.layout, **dims), definition.abstract, tokens)
    assert len(whole) >= 4
    assert kept
    assert not (whole | {(2, *shape) for shape in whole}) & set(kept)


@pytest.mark.parametrize("loop", LOOPS)
def test_beside_low_rank_factors_no_matrix_has_a_gradient(loop):
    """One reduce-scatter for each of a layer's seven matrices: of the factor that is split."""
    plan = Retraining(
        cases.define("ladder", num_layers=2, fsdp=4, tensor=2), lora=LoraConfig(rank=3)
    )
    batch = jax.ShapeDtypeStruct(
        (ROWS, LENGTH + 1), "int32", sharding=plan.definition.layout.sharding("BT")
    )
    frozen = {"model": plan.definition.abstract}
    gradients = task_gradients(plan, config=TrainConfig(loop=loop))
    program = jax.jit(gradients).lower(plan.abstract, frozen, batch, {}).compile().as_text()
    assert program.count(" reduce-scatter(") == 7 * (2 if loop is Loop.UNROLLED else 1)
