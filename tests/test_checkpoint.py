"""Checkpoints: any mesh reads any other's; nothing damaged or foreign is ever loaded."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from ladder_jax import nn, train
from ladder_jax.checkpoint import Store, open_checkpoint
from ladder_jax.config import RunConfig, TrainConfig
from ladder_jax.errors import UserError
from ladder_jax.parallel import make_mesh
from ladder_jax.train import optimizer
from tests import cases

RECIPE = TrainConfig(steps=10, batch=4, sequence=8, warmup_steps=2)


def save(folder, name="ladder", **mesh):
    """A trained step on the given mesh, saved; returns its definition and its parameters as NumPy."""
    definition = cases.define(name, **mesh)
    state = train.initial_state(definition, config=RECIPE)
    state, _ = train.train_step(definition, config=RECIPE)(state, cases.tokens((4, 9)))
    store = Store(folder, config=RunConfig(model=definition.config, train=RECIPE))
    store.save(1, params=state.params, optimizer=optimizer.to_dict(state.optimizer))
    store.close()
    return definition, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    return folder, *save(folder, data=2, tensor=4)


@pytest.mark.parametrize("mesh", [dict(tensor=8), dict(), dict(data=4, tensor=2)], ids=str)
def test_restored_on_another_mesh(saved, mesh):
    folder, before, params = saved
    definition = cases.define("ladder", **mesh)
    checkpoint = open_checkpoint(folder)
    restored = checkpoint.params(definition)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(restored), strict=True):
        rows = 251 if path[-1].key == "table" else len(a)
        np.testing.assert_array_equal(a[:rows], np.asarray(b)[:rows])
        assert not np.asarray(b)[rows:].any()
        assert b.sharding == definition.abstract[path[0].key][path[1].key].sharding if len(path) == 2 else True
    there, here = (
        np.asarray(nn.compiled_logits(d)(cases.place(p, d), cases.tokens()))
        for d, p in ((before, params), (definition, restored))
    )
    assert cases.error(here, there) < 2 * cases.bound(definition.config)
    state = train.initial_state(definition, config=RECIPE)
    moments = checkpoint.optimizer(optimizer.to_dict(state.optimizer))
    assert int(moments["count"]) == 1 and np.asarray(moments["mu"]["layers"]["mlp"]["up"]).any()


@pytest.mark.parametrize("name", ["ladder-fresh", "desync-2"])
def test_a_function_of_four_ranks_stays_one(tmp_path, name):
    definition, params = save(tmp_path / "c", name, data=2, tensor=4)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.config.model.ranks == 4
    with pytest.raises(UserError, match="function of model.ranks=4 ranks; mesh.tensor=8"):
        nn.define(checkpoint.config.model, mesh=make_mesh(tensor=8))
    emulated = nn.define(checkpoint.config.model, mesh=make_mesh())
    a = nn.compiled_logits(definition)(cases.place(params, definition), cases.tokens())
    b = nn.compiled_logits(emulated)(checkpoint.params(emulated), cases.tokens())
    assert cases.error(b, a) < 2 * cases.bound(definition.config)


def test_plain_names_and_a_format_version(saved):
    folder, *_ = saved
    meta = json.loads((folder / "1" / "meta" / "metadata").read_text())
    assert (meta["format"], meta["version"], meta["step"]) == ("ladder_jax", 1, 1)
    assert meta["config"]["model"]["residual"] == "ladder"
    tree = json.loads((folder / "1" / "params" / "_METADATA").read_text())["tree_metadata"]
    assert "('layers', 'attention', 'query')" in tree and "('embedding', 'table')" in tree
    assert not any("value" == part for name in tree for part in eval(name)[1:-1])  # no framework's wrapper


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda c: shutil.rmtree(c / "1"), "holds no ladder_jax checkpoint"),
        (lambda c: (c / "1" / "meta" / "metadata").unlink(), "holds no ladder_jax checkpoint"),
        (lambda c: (c / "1" / "meta" / "metadata").write_text("{"), "is damaged or incomplete"),
        (lambda c: (c / "1" / "meta" / "metadata").write_text('{"format": "other"}'), "of another program"),
        (lambda c: (c / "1" / "meta" / "metadata").write_text('{"format": "ladder_jax", "version": 99}'), "version 99"),
        (lambda c: shutil.rmtree(c / "1" / "params"), "is damaged or incomplete"),
        (lambda c: (c / "1" / "params" / "_METADATA").unlink(), "is damaged or incomplete"),
    ],
    ids=["no step", "no meta", "half a meta", "foreign", "newer", "no params", "no tree"],
)
def test_what_is_not_a_whole_checkpoint_is_refused(saved, tmp_path, damage, message):
    copy = tmp_path / "checkpoints"
    shutil.copytree(saved[0], copy)
    damage(copy)
    with pytest.raises(UserError, match=message):
        open_checkpoint(copy).params(cases.define("ladder"))


def test_another_shape_is_refused(saved):
    definition = cases.define("ladder", d_ff=64)
    with pytest.raises(UserError, match=r"does not fit its configuration: layers/mlp/down is \(4, 48, 32\)"):
        open_checkpoint(saved[0]).params(definition)


def test_paths_that_lead_nowhere(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        open_checkpoint(tmp_path / "file")
    with pytest.raises(UserError, match="holds no ladder_jax checkpoint"):
        open_checkpoint(tmp_path)


def test_dataclass_of_the_config_round_trips(saved):
    config = open_checkpoint(saved[0]).config
    assert dataclasses.replace(config, model=config.model) == config and config.train == RECIPE
