"""Steps, the recipe, and whole runs: what they leave, resumed or refused."""

import itertools
import json
import math
import os
import re
import socket
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest

from ladder_jax import config, nn, train
from ladder_jax.checkpoint.arrays import named
from ladder_jax.config import Loop, TrainConfig
from ladder_jax.errors import UserError
from ladder_jax.train import folder, metrics, session, step as steps
from tests import cases, experts, reference, runs
from tests.covering import marked
from tests.processes.conftest import free_port
from tests.refusals import refused

RECIPE = TrainConfig(
    steps=100, batch=4, sequence=9, warmup_steps=10, clip_norm=0.05, learning_rate=1e-2
)


def dense_step(params, tokens, shape, recipe):
    """One AdamW step from zero moments, in float64: clip by the global norm, decay what is a
    matrix.
    """
    loss, grads = reference.evaluate(reference.loss, params, tokens, shape, gradient=True)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * min(1, recipe.clip_norm / norm), grads)
    rate = recipe.learning_rate / recipe.warmup_steps

    def update(path, p, g):
        mean = (1 - recipe.beta1) * g
        square = (1 - recipe.beta2) * g**2
        step = mean / (1 - recipe.beta1) / (np.sqrt(square / (1 - recipe.beta2)) + recipe.eps)
        decay = 0 if "norm" in str(path) else recipe.weight_decay
        return p - rate * (step + decay * p)

    return loss, norm, jax.tree_util.tree_map_with_path(update, params, grads)


def test_every_number_is_float32_where_jax_has_64_bits():
    """Of weights and gradients of experts, in parts of the batch and of the loss; and of weights
    that are stored in bfloat16.
    """
    definition = experts.define("ladder", tensor=2)
    compute = train.loss_and_gradients(definition, accumulate=2, loss_chunk=3)
    with jax.enable_x64(True):
        params = jax.eval_shape(lambda: nn.initialize(definition))
        found = params, jax.eval_shape(compute, params, experts.tokens())
    stored = jax.tree.map(lambda a: a.update(dtype="bfloat16"), params)
    found = found, jax.eval_shape(train.loss_and_gradients(definition), stored, experts.tokens())
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_many_short_rows_hold_the_logits_of_a_chunk_at_most():
    definition = cases.define("ladder", vocab_size=384)
    compute = train.loss_and_gradients(definition, loss_chunk=3)
    program = str(jax.make_jaxpr(compute)(definition.abstract, cases.tokens((8, 4))))
    held = {
        math.prod(map(int, rows.split(","))) for rows in re.findall(r"f32\[([\d,]+),384\]", program)
    }
    assert held == {3}


MESHES = [(1, 8), (2, 4), (1, 1)]  # data, tensor


@pytest.mark.parametrize(
    "mesh, loop", marked(itertools.product(MESHES, Loop), chosen=list(zip(MESHES, Loop))), ids=str
)
def test_a_step_is_adamw_with_the_norm_of_all_shards(mesh, loop):
    """In both forms of the loop; and the old state's buffers are reused."""
    data, tensor = mesh
    definition = cases.define("ladder", num_layers=2, data=data, tensor=tensor)
    recipe = replace(RECIPE, loop=loop)
    params, tokens = cases.parameters(definition), cases.tokens((4, 10))
    expected_loss, norm, expected = dense_step(
        params, tokens, cases.shape("ladder", definition.config, ranks=1), recipe
    )
    assert norm > 2 * RECIPE.clip_norm  # it does clip
    first = train.initial_state(definition, config=recipe, params=cases.place(params, definition))
    state, metrics = train.train_step(definition, config=recipe)(first, tokens)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(metrics["loss"], expected_loss) < limit
    assert cases.error(metrics["gradient_norm"], norm) < limit
    rate = RECIPE.learning_rate / RECIPE.warmup_steps
    assert float(metrics["learning_rate"]) == pytest.approx(rate)
    # Adam's first step is about the gradient's sign: where a gradient is near 0 rounding decides
    # it, so compare all but the few entries whose sign could differ.
    old = named(params)
    wanted = named(expected)
    for name, new in named(state.params).items():
        off = np.abs(np.asarray(new) - wanted[name]) > 1e-3 * rate + 1e-6 * np.abs(old[name])
        assert off.mean() < 1e-2, (name, off.mean())
    assert state.step == 1


def test_the_papers_schedule():
    rate = steps.learning_rate(TrainConfig())
    assert float(rate(1_999)) == pytest.approx(3e-4)
    assert float(rate(999)) == pytest.approx(1.5e-4)
    assert float(rate(2_000 + (25_000 - 2_000) // 2)) == pytest.approx(3e-4 * 0.55, rel=1e-3)
    assert float(rate(25_000)) == pytest.approx(3e-5)
    assert float(steps.learning_rate(TrainConfig(steps=5, warmup_steps=10))(4)) == pytest.approx(
        3e-4
    )


def test_what_is_not_a_matrix_is_not_decayed():
    """A zero gradient moves what is decayed, and nothing else."""
    definition = cases.define("ladder", biases=config.Biases.ALL, qk_norm=True)
    adamw = steps.adamw(RECIPE, dims=definition.dims)
    params = jax.tree.map(lambda a: np.ones(a.shape, np.float32), definition.abstract)
    zero = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(adamw.update)(zero, adamw.init(params), params)
    decayed = {name.rpartition("/")[2] for name, update in named(updates).items() if update.any()}
    assert decayed == set("table query key value out gate up down".split())


SETTINGS = "train.steps=30 train.checkpoint_every=10 mesh.data=2 mesh.tensor=4".split()


def run(book, directory, *more, **say):
    return runs.run(book, directory, *SETTINGS, *more, **say)


@pytest.fixture(scope="module")
def uninterrupted(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, run(book, directory)


def test_a_run_leaves_what_it_promises(uninterrupted):
    directory, result = uninterrupted
    stored = json.loads((directory / "config.json").read_text())
    assert stored["model"]["residual"] == "ladder"
    assert stored["mesh"] == {"data": 2, "fsdp": 1, "tensor": 4, "experts": "reduce"}
    rows = metrics.read(directory)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert list(rows[0])[:4] == ["step", "loss", "tokens", "tokens_per_second"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert rows[-1]["tokens"] == 30 * 4 * 32
    assert sorted(int(p.name) for p in (directory / "checkpoints").iterdir()) == [10, 20, 30]
    assert result.steps == 30
    assert 0 < result.validation_loss < 6


def test_the_profilers_port(uninterrupted, book):
    """It is open while the run lasts."""
    directory, _ = uninterrupted
    port = free_port()
    connections = []

    def connect(line):
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            connections.append(line)

    say = lambda line: "devices" in line and connect(line)
    run(book, directory, f"run.profiler_port={port}", say=say)
    assert connections
    with pytest.raises(ConnectionRefusedError):
        connect("after the run")


def test_a_changed_configuration_is_refused(uninterrupted, book):
    directory, _ = uninterrupted
    before = sorted(p.stat().st_mtime_ns for p in directory.rglob("*"))
    with refused("train.learning_rate was 0.004, now 0.1"):
        run(book, directory, "train.learning_rate=0.1")
    assert sorted(p.stat().st_mtime_ns for p in directory.rglob("*")) == before


def test_a_run_without_steps_may_be_begun_anew(book, tmp_path, monkeypatch):
    """With other settings, such as a smaller batch after the first one needed too much memory; not
    from other weights, whose tokenizer may be another one. A part of a checkpoint counts as steps.
    """
    directory = tmp_path / "run"
    larger = "train.batch=8"
    with monkeypatch.context() as patched, refused("out of memory"):
        patched.setattr(session.Session, "run", mock.Mock(side_effect=UserError("out of memory")))
        run(book, directory, larger)
    given = config.load("tiny", overrides=runs.words(book, directory))
    start = replace(given, train=replace(given.train, start="elsewhere"))
    part = directory / "checkpoints/1"
    for wrong in (start, given):
        with refused("train.batch was 8, now 4"):
            folder.check(wrong, directory)
        part.mkdir(parents=True, exist_ok=True)
    part.rmdir()
    run(book, directory)
    assert json.loads((directory / "config.json").read_text())["train"]["batch"] == 4
    assert metrics.read(directory)[0]["tokens"] == 4 * 32
    with refused("train.batch was 4, now 8"):
        run(book, directory, larger)


def test_a_folder_of_something_else_is_left_alone(book, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with refused("is not empty and holds no config.json"):
        run(book, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_among_the_data(tmp_path, monkeypatch):
    """As `data.path=.` is: the first checkpoint would have been the last, as the data had changed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 400)
    with refused(r"run' lies in data.path='\.': its own files would become"):
        run(".", tmp_path / "runs/run")
    assert os.listdir(tmp_path) == ["book.txt"]
    run("book.txt", tmp_path / "runs/run")


@pytest.mark.parametrize("name", ["caf\udce9", "a\0b", "a.__lock/b"])
def test_a_folder_that_no_checkpoint_could_be_written_to(book, tmp_path, name):
    """Of bytes that are no UTF-8: the run would have gone on, without its checkpoints."""
    with refused("cannot hold checkpoints: the path must be UTF-8 text"):
        run(book, tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: p.write_text(""), "holds no text"),
        (lambda p: p.write_text(" \n"), "holds no text"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00binary"), "not UTF-8 text, at byte 0"),
        (lambda p: p.write_text("too short"), "fewer than train.sequence"),
        (lambda p: p.mkdir(), "holds no text"),
    ],
    ids=["empty", "blank", "binary", "short", "empty folder"],
)
def test_text_that_cannot_be_trained_on(tmp_path, make, message):
    make(tmp_path / "text")
    with refused(message):
        run(tmp_path / "text", tmp_path / "run")
    assert not (tmp_path / "run").exists()
