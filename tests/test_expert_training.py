"""Training runs of models with experts: metrics, another mesh on resuming, retraining from a
checkpoint, refusals.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ladder_jax import checkpoint, config, nn, parallel, train
from ladder_jax.nn import router_losses
from ladder_jax.overlap import programs
from ladder_jax.train import metrics, timing
from tests.changed import ROOT

# A scan is compiled in a quarter of the time.
TINY = """
    model.num_layers=2 model.d_model=32 model.dtype=float32 model.residual_dtype=float32 model.residual=farskip
    model.moe.experts=6 model.moe.expert_width=16 model.moe.shared_width=16 model.moe.router_bias=true
    train.batch=4 train.sequence=32 train.warmup_steps=1 train.log_every=1 train.checkpoint_every=2
    train.evaluate_every=0 train.evaluation_batches=1 train.loop=scan run.tensorboard=false
""".split()
EVERYTHING = """
    model.ladder_layers=1 train.freeze=1 lora.rank=2 distill.teacher=start distill.residual=standard
    conversion.steps=3 train.steps=4 mesh.tensor=2
""".split()
NAMES = {"expert_load", "dead_experts", "load_balance", "router_z", "router_entropy"}


def run(book, folder, *more):
    settings = config.load(
        "tiny-moe", overrides=[*TINY, f"data.path={book}", f"run.dir={folder}", *more]
    )
    return train.run(settings, say=lambda line: None)


def test_a_run_its_metrics_and_its_checkpoint_on_other_ranks(book, tmp_path):
    """Six experts on four ranks, which are padded, and then on one; the losses are those of one
    mesh throughout.
    """
    more = "train.steps=4", "train.accumulate=2"
    padded = run(book, tmp_path / "run", "mesh.tensor=4", *more)
    of_one_mesh = metrics.read(tmp_path / "run")
    biases = bias_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    written = json.loads((tmp_path / "run/config.json").read_text())
    # as if the run were older than this setting
    assert written["model"]["moe"].pop("shared_gate") is False
    (tmp_path / "run/config.json").write_text(json.dumps(written))
    assert run(book, tmp_path / "run", "mesh.data=2", *more).parameters == padded.parameters
    rows = metrics.read(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert 1 <= row["expert_load"] <= 6
        assert row["dead_experts"] <= 12
        assert row["load_balance"] >= 1 - 1e-3
        assert 0 < row["router_entropy"] <= np.log(6) + 1e-4
    assert f"expert load {rows[-1]['expert_load']:.1f}" in timing.row_text(rows[-1])
    for row, other in zip(rows[2:], of_one_mesh[2:], strict=True):
        of = {name: other[name] for name in ("loss", *NAMES)}
        assert {name: row[name] for name in of} == pytest.approx(of, rel=2e-4)

    # Each router's biases moved by the rate a step, and they are those of the batch, not of a rank
    # or a part.
    assert_array_equal(biases, bias_of(tmp_path / "run"))
    moves = biases / 0.001
    assert np.abs(moves).max() <= 4.01
    assert np.abs(moves - moves.round()).max() < 1e-3
    assert len(np.unique(moves.round())) > 2

    started = run(book, tmp_path / "on", f"train.start={tmp_path / 'run'}", *EVERYTHING)
    rows = metrics.read(tmp_path / "on")
    assert all(NAMES <= row.keys() for row in rows)
    assert started.steps == 4
    # of one in two layers
    assert [row["turned"] for row in rows] == pytest.approx([0.5, 2 / 3, 5 / 6, 1])
    first = rows[0]  # a standard model, as its teacher is
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["divergence"] > 0
    losses = 0.01 * first["load_balance"] + 0.001 * first["router_z"]
    assert first["loss"] == pytest.approx(first["divergence"] + losses, rel=1e-5)
    saved = checkpoint.open_checkpoint(tmp_path / "on")
    before = checkpoint.open_checkpoint(tmp_path / "run").config.model
    assert saved.config.model == dataclasses.replace(before, ladder_layers="1")
    # frozen beside low-rank factors
    assert_array_equal(bias_of(tmp_path / "on"), biases)


def bias_of(folder):
    saved = checkpoint.open_checkpoint(folder)
    params = saved.params(nn.define(saved.config.model, mesh=parallel.make_mesh()))
    return np.asarray(params["layers"]["mlp"]["router_bias"])


def test_a_bias_moves_toward_less_load():
    counts = np.float32([[3, 3, 6, 0], [3, 3, 3, 3]])
    for factor in (1, 1 / 3, 7e-8):
        signs = router_losses.toward_balance(counts * np.float32(factor), choices=12)
        assert_array_equal(signs, [[0, 0, -1, 1], [0, 0, 0, 0]])


def test_a_steps_counts_may_be_no_int32():
    overrides = [*TINY, "train.batch=1048576", "train.sequence=1024"]
    settings = config.load("tiny-moe", overrides=overrides)
    definition = nn.define(settings.model, mesh=parallel.make_mesh())
    function, arguments = programs.training(definition, config=settings.train)
    function.lower(*arguments)


@pytest.mark.full
def test_biases_balance_the_load(book, tmp_path):
    """Without any loss for it, over 60 steps; frozen layers keep theirs."""
    plain = (
        "train.steps=60 train.load_balance=0 train.router_z_loss=0 train.learning_rate=1e-2".split()
    )
    settings = {"off": ["train.router_bias_rate=0"], "on": ["train.router_bias_rate=0.01"]}
    loads = {}
    for name, more in settings.items():
        run(book, tmp_path / name, *plain, *more)
        loads[name] = np.mean([row["expert_load"] for row in metrics.read(tmp_path / name)[-20:]])
    assert loads["on"] < 0.8 * loads["off"], loads
    assert not bias_of(tmp_path / "off").any()
    assert bias_of(tmp_path / "on").any()
    start = [f"train.start={tmp_path / 'on'}", "train.freeze=1", "train.steps=3"]
    run(book, tmp_path / "frozen", *plain[1:], *start, *settings["on"])
    before = bias_of(tmp_path / "on")
    after = bias_of(tmp_path / "frozen")
    assert (before[0] == after[0]).all()
    assert (before[1] != after[1]).any()
    names = {"train.start": "frozen", "distill.teacher": "on", "run.dir": "taught"}
    small = [
        "train.steps=2",
        "train.batch=4",
        "train.sequence=32",
        "train.log_every=1",
        f"data.path={book}",
    ]
    overrides = [*small, *(f"{name}={tmp_path / folder}" for name, folder in names.items())]
    train.run(
        config.load(ROOT / "experiments/retrain/experts.yaml", overrides=overrides),
        say=lambda line: None,
    )
    assert all(row["divergence"] >= 0 for row in metrics.read(tmp_path / "taught"))
