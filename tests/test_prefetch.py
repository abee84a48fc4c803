"""Weights gathered one layer ahead: what the loop's own VJP keeps, and runs of layers of several kinds.

Its numbers on every mesh are held to one device's in test_meshes.py, its schedules in test_schedule.py.
"""

import jax
import numpy as np
import pytest

from ladder_jax.config import Loop, LoraConfig, Remat, TrainConfig
from ladder_jax.nn import prefetch
from ladder_jax.parallel import fsdp
from ladder_jax.retrain import Retraining
from ladder_jax.train.gradients import loss_and_gradients, task_gradients
from tests import cases
from tests.test_meshes import LENGTH, ROWS


@pytest.fixture
def kept(monkeypatch):
    """(a layer's arrays, what its pullback keeps beside them) of every layer that is traced."""
    kept = []
    pull_back = prefetch._pull_back

    def watch(layer, state, whole, **settings):
        state, of_layer = pull_back(layer, state, whole, **settings)
        kept.append((jax.tree.leaves(whole), [leaf for leaf in of_layer.leaves if leaf is not None]))
        return state, of_layer

    monkeypatch.setattr(prefetch, "_pull_back", watch)
    return kept


@pytest.mark.parametrize("remat", Remat)
@pytest.mark.parametrize("loop", Loop)
def test_no_whole_matrix_is_kept_for_the_backward_pass(loop, remat, kept):
    definition = cases.define("ladder", num_layers=2, fsdp=4, tensor=2)
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH + 1), "int32", sharding=definition.layout.sharding("BT"))
    jax.jit(loss_and_gradients(definition, loop=loop, remat=remat)).lower(definition.abstract, batch)
    assert len(kept) == (2 if loop is Loop.UNROLLED else 1)
    for whole, leaves in kept:
        matrices = {a.shape for a in whole if a.ndim > 1}
        assert len(matrices) >= 4 and not matrices & {leaf.shape for leaf in leaves}


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
@pytest.mark.parametrize("loop", Loop)
def test_beside_low_rank_factors_no_matrix_is_kept_and_none_has_a_gradient(loop, remat, kept, monkeypatch):
    scattered, scatter = [], fsdp.FsdpLayer.scatter
    monkeypatch.setattr(fsdp.FsdpLayer, "scatter", lambda self, g: (scattered.extend(g), scatter(self, g))[1])
    plan = Retraining(cases.define("ladder", num_layers=2, fsdp=4, tensor=2), lora=LoraConfig(rank=3))
    batch = jax.ShapeDtypeStruct((ROWS, LENGTH + 1), "int32", sharding=plan.definition.layout.sharding("BT"))
    frozen = {"model": plan.definition.abstract}
    gradients = task_gradients(plan, config=TrainConfig(loop=loop, remat=remat))
    jax.jit(gradients).lower(plan.abstract, frozen, batch, {})
    for whole, leaves in kept:
        matrices = {a.shape for a in whole if a.ndim > 1 and 3 not in a.shape}
        assert len(matrices) >= 4 and not matrices & {leaf.shape for leaf in leaves}
    assert scattered and all(3 in gradient.shape for gradient in scattered)


def loss_and_gradients_of(*, mesh, loop):
    """A hybrid: in a scan, a layer, a run of two, a layer."""
    definition = cases.define("ladder", num_layers=4, ladder_layers="1,2", **mesh)
    params = cases.place(cases.parameters(definition), definition)
    batch = jax.device_put(cases.tokens((ROWS, LENGTH + 1)), definition.layout.sharding("BT"))
    loss, gradients = jax.jit(loss_and_gradients(definition, loop=loop))(params, batch)
    return definition.config, float(loss), jax.tree.map(np.asarray, gradients)


def test_several_runs_of_layers():
    config, loss, gradients = loss_and_gradients_of(mesh={}, loop=Loop.SCAN)
    for loop in Loop:
        _, ours, found = loss_and_gradients_of(mesh=dict(fsdp=4, tensor=2), loop=loop)
        bound = cases.bound(config, passes=2)
        assert abs(ours - loss) <= bound * loss
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
            padded = a.ndim == 2 and a.shape[0] >= config.vocab_size
            assert (cases.error_but_for_padding if padded else cases.error)(a, b) < bound
