"""Bad steps: what the compiled step keeps, and what stop, skip and rollback make of it."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from ladder_jax import config, train
from ladder_jax.config import OnBadStep, TrainConfig
from ladder_jax.data import dataset
from ladder_jax.errors import RunFailed
from ladder_jax.train import metrics, session
from tests import cases

RECIPE = TrainConfig(
    steps=10, batch=4, sequence=8, warmup_steps=2, spike_factor=1.5, spike_window=2
)


def test_the_compiled_step_keeps_the_old_state():
    """A loss that is no number, and one that jumped, change nothing but the step's number; a good
    one trains.
    """
    definition = cases.define("ladder", num_layers=2, tensor=2)
    params = cases.placed(definition)
    fresh = lambda: train.initial_state(
        definition, config=RECIPE, params=jax.tree.map(lambda a: a.copy(), params)
    )
    tokens = cases.tokens((4, 9))
    step = train.train_step(definition, config=RECIPE)

    good, found = step(fresh(), tokens)
    loss = float(found["loss"])
    assert not found["bad"]
    assert (float(good.mean_loss), int(good.good_steps)) == (pytest.approx(loss), 1)

    poisoned = jax.tree.map(lambda a: a.copy(), params)
    poisoned["layers"]["mlp"]["up"] = poisoned["layers"]["mlp"]["up"] * np.float32(np.nan)
    for state, mean, count, bad in (
        (train.initial_state(definition, config=RECIPE, params=poisoned), 0.0, 0, True),
        (fresh(), loss / 1.6, 2, True),
        (fresh(), loss / 1.4, 2, False),
        (fresh(), loss / 1.6, 1, False),  # a mean of too few steps
    ):
        before = jax.tree.map(np.asarray, state)
        place = lambda value, like=state.step: jax.device_put(value, like.sharding)
        state = dataclasses.replace(
            state, mean_loss=place(np.float32(mean)), good_steps=place(np.int32(count))
        )
        after, found = step(state, tokens)
        assert bool(found["bad"]) == bad
        assert int(after.step) == 1
        assert int(after.good_steps) == count + (not bad)
        same = [np.array_equal(a, b, equal_nan=True) for a, b in
                zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params))]  # fmt: skip
        assert all(same) if bad else not any(same)
        assert bad == (int(after.optimizer[1].count) == 0)
        if not bad:
            assert float(after.mean_loss) == pytest.approx(mean + (loss - mean) / 2, rel=1e-6)
            # The window's share, 1/2, and not 1/3 for the third.


def test_the_limits():
    bad = {"loss": float("nan"), "gradient_norm": 1.0}
    policy = session.BadStepPolicy(
        dataclasses.replace(RECIPE, on_bad_step=OnBadStep.SKIP, max_bad_steps=2), {3: "before"}
    )
    policy.bad(5, bad, saved=0)
    policy.bad(6, bad, saved=0)
    policy.good()
    policy.bad(8, bad, saved=4)
    policy.bad(9, bad, saved=4)
    with pytest.raises(
        RunFailed,
        match="step 10: the loss is nan: stopped after 3 bad steps in a row; the newest .* 4",
    ):
        policy.bad(10, bad, saved=4)
    assert sorted(policy.left_out) == [3, 5, 6, 8, 9]

    back = session.BadStepPolicy(
        dataclasses.replace(
            RECIPE, on_bad_step=OnBadStep.ROLLBACK, max_bad_steps=2, rollback_batches=3
        )
    )
    jump = {"loss": 9.0, "gradient_norm": 1.0}
    for step, left_out in ((20, range(18, 21)), (21, range(19, 22))):
        with pytest.raises(
            session.RollBack, match="the loss jumped to 9.000, over 1.5 times"
        ) as raised:
            back.bad(step, jump, saved=10)
        assert back.returned(raised.value, to=10) == left_out
    assert sorted(back.left_out) == [18, 19, 20, 21]
    with pytest.raises(RunFailed, match="stopped after 2 returns"):
        back.bad(22, jump, saved=10)
    back.saved()
    with pytest.raises(session.RollBack) as raised:
        back.bad(12, jump, saved=11)
    assert back.returned(raised.value, to=11) == range(12, 13)
    with pytest.raises(
        RunFailed,
        match="the gradient norm is inf: stopped; there is no checkpoint yet.*=skip or rollb",
    ):
        session.BadStepPolicy(RECIPE).bad(1, {"loss": 1.0, "gradient_norm": float("inf")}, saved=0)


SPIKE, STEPS = 20, 32
TINY = [
    "model.num_layers=2",
    "model.d_model=32",
    "model.d_ff=32",
    "model.dtype=float32",
    f"train.steps={STEPS}",
    "train.batch=4",
    "train.sequence=32",
    "train.log_every=1",
    "train.checkpoint_every=8",
    "train.warmup_steps=5",
    "train.evaluate_every=0",
    "train.evaluation_batches=1",
    "train.keep_checkpoints=9",
    "mesh.tensor=2",
    "train.spike_factor=1.25",
    "train.spike_window=8",
    "train.rollback_batches=3",
    "run.tensorboard=false",
]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return noisy_at([SPIKE], tmp_path_factory.mktemp("data") / "book.txt")


def noisy_at(steps, path):
    """A text of which the windows that these steps train on are noise: their loss jumps."""
    content = np.frombuffer(
        "".join(f"line {i} of a book on {i % 7} things\n" for i in range(2000)).encode(), np.uint8
    )
    settings = config.load("tiny", overrides=TINY)
    count = len(content) - int(len(content) * settings.data.validation_fraction)
    windows = dataset.windows(np.arange(count, dtype=np.int32), settings.train.sequence)
    rows, batch = dataset.shuffled(windows, seed=settings.train.seed), settings.train.batch
    place = [rows[(step - 1) * batch + index][0] for step in steps for index in range(batch)]
    noisy = content.copy()
    for start in place:
        noisy[start : start + 33] = np.random.default_rng(start).integers(65, 91, 33)
    path.write_bytes(noisy.tobytes())
    return path


def run(book, directory, *more):
    said = []
    train.run(
        config.load("tiny", overrides=[*TINY, f"data.path={book}", f"run.dir={directory}", *more]),
        say=said.append,
    )
    return said


def losses(directory):
    return [(row["step"], row["loss"], row.get("event")) for row in metrics.read(directory)]


def position(directory, step):
    return json.loads((directory / "checkpoints" / str(step) / "data" / "metadata").read_text())


@pytest.fixture(scope="module")
def stopped(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stop") / "run"
    with pytest.raises(
        RunFailed,
        match="step 20: the loss jumped to .*: stopped; the newest checkpoint is that of step 16",
    ):
        run(book, directory)
    assert [step for step, *_ in losses(directory)] == list(range(1, SPIKE))
    return directory


@pytest.fixture(scope="module")
def skipped(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("skip") / "run"
    said = run(book, directory, "train.on_bad_step=skip")
    assert any(line.startswith("step 20: batch left out: the loss jumped to ") for line in said)
    return directory


def test_skip(skipped, stopped):
    rows = losses(skipped)
    assert [step for step, *_ in rows] == list(range(1, STEPS + 1))
    assert rows[: SPIKE - 1] == losses(stopped)
    (event,) = [row for row in rows if row[2]]
    assert event[0] == SPIKE
    assert event[1] > 1.25 * rows[SPIKE - 2][1]
    assert "jumped" in event[2]
    assert rows[SPIKE][1] < 1.1 * rows[SPIKE - 2][1]
    assert position(skipped, 16)["skipped"] == []
    assert position(skipped, 24)["skipped"] == [SPIKE]
    assert position(skipped, 24)["count"] == 23


def test_a_stopped_run_goes_on_with_another_policy(book, stopped, skipped, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(stopped, directory)
    run(book, directory, "train.on_bad_step=skip")
    assert losses(directory) == losses(skipped)
    assert position(directory, 32)["skipped"] == [SPIKE]


def test_a_run_resumed_after_the_jump_goes_on_alike(book, skipped, tmp_path):
    """The mean that a jump is measured against is part of the checkpoint, as is what was left
    out.
    """
    directory = tmp_path / "run"
    shutil.copytree(skipped, directory)
    shutil.rmtree(directory / "checkpoints" / "32")
    run(book, directory, "train.on_bad_step=skip")
    assert losses(directory) == losses(skipped)
    assert position(directory, 32)["skipped"] == [SPIKE]


def test_rollback(book, stopped, skipped, tmp_path):
    """Back to step 16, and on without the batches of the steps 18 to 20; a resumed run does the
    same.
    """
    directory = tmp_path / "run"
    said = run(book, directory, "train.on_bad_step=rollback")
    assert any(
        "back to step 16, and on without the batches of the steps 18 to 20" in line for line in said
    )
    rows = losses(directory)
    assert [step for step, *_ in rows] == list(range(1, STEPS + 1))
    assert rows[:17] == losses(stopped)[:17]
    assert [row[1] for row in rows[17:20]] == [None] * 3
    assert all("step 20: the loss jumped" in r[2] for r in rows[17:20])
    assert rows[20][1] is not None
    assert rows[20] != losses(skipped)[20]
    assert position(directory, 24)["skipped"] == [18, 19, 20]
    for path in (directory / "checkpoints").iterdir():
        if int(path.name) > 16:
            shutil.rmtree(path)
    run(book, directory, "train.on_bad_step=rollback")
    assert losses(directory) == rows


def test_a_good_step_between_two_bad_ones_ends_the_row(tmp_path):
    """Of bad steps one at a time is allowed here, as often as they come."""
    book = noisy_at([SPIKE, SPIKE + 3, SPIKE + 6], tmp_path / "book.txt")
    run(book, tmp_path / "run", "train.on_bad_step=skip", "train.max_bad_steps=1")
    assert [step for step, _, event in losses(tmp_path / "run") if event] == [
        SPIKE,
        SPIKE + 3,
        SPIKE + 6,
    ]


def test_no_number_at_all(book, tmp_path):
    """A learning rate that ends every run: stopped at the second step, or after too many returns to
    the beginning.
    """
    wild = ["train.learning_rate=1e30", "train.spike_factor=0", "train.warmup_steps=0"]
    with pytest.raises(
        RunFailed,
        match=r"step 2: the (loss|gradient norm) is (nan|inf): stopped; there is no checkpoint",
    ):
        run(book, tmp_path / "a", *wild)
    assert [step for step, *_ in losses(tmp_path / "a")] == [1]
    with pytest.raises(RunFailed, match="stopped after 3 returns"):
        run(book, tmp_path / "b", *wild, "train.on_bad_step=rollback", "train.max_bad_steps=3")
