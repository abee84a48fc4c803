"""Bad steps: what the compiled step keeps, and what stop, skip and rollback make of it."""

import dataclasses
import functools
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
from tests import cases, engines, runs

RECIPE = TrainConfig(
    steps=10, batch=4, sequence=8, warmup_steps=2, spike_factor=1.5, spike_window=2
)


def test_the_compiled_step_keeps_the_old_state():
    """A loss that is no number, and one that jumped, change nothing but the step's number; a good
    one trains.
    """
    definition, params = engines.parts(tensor=2)
    # of copies, as a step reuses what it is given
    fresh = lambda values: train.initial_state(
        definition, config=RECIPE, params=jax.tree.map(lambda a: a.copy(), values)
    )
    tokens = cases.tokens((4, 9))
    step = train.train_step(definition, config=RECIPE)

    good, found = step(fresh(params), tokens)
    loss = float(found["loss"])
    assert not found["bad"]
    assert (float(good.mean_loss), int(good.good_steps)) == (pytest.approx(loss), 1)

    poisoned = jax.tree.map(lambda a: a.copy(), params)
    poisoned["layers"]["mlp"]["up"] *= np.nan
    for values, mean, count, bad in (
        (poisoned, 0.0, 0, True),
        (params, loss / 1.6, 2, True),
        (params, loss / 1.4, 2, False),
        (params, loss / 1.6, 1, False),  # a mean of too few steps
    ):
        place = lambda value: jax.device_put(value, good.step.sharding)
        known = dict(mean_loss=place(np.float32(mean)), good_steps=place(np.int32(count)))
        after, found = step(dataclasses.replace(fresh(values), **known), tokens)
        assert found["bad"] == bad
        assert after.step == 1
        assert after.good_steps == count + (not bad)
        # the window's share, 1/2, and not 1/3 for the third
        wanted = mean if bad else mean + (loss - mean) / 2
        assert float(after.mean_loss) == pytest.approx(wanted, rel=1e-6)
        same = jax.tree.map(functools.partial(np.array_equal, equal_nan=True), values, after.params)
        assert set(jax.tree.leaves(same)) == {bad}
        assert bad == (after.optimizer[1].count == 0)


def test_the_limits():
    limits = lambda **more: session.BadStepPolicy(
        dataclasses.replace(RECIPE, max_bad_steps=2, **more), {3: "before"}
    )
    bad = {"loss": float("nan"), "gradient_norm": 1.0}
    policy = limits(on_bad_step=OnBadStep.SKIP)
    policy.bad(5, bad)
    policy.bad(6, bad)
    policy.good()
    policy.bad(8, bad)
    policy.bad(9, bad)
    said = "step 10: the loss is nan: stopped after 3 bad steps in a row$"
    with pytest.raises(RunFailed, match=said):
        policy.bad(10, bad)
    assert sorted(policy.left_out) == [3, 5, 6, 8, 9]

    back = limits(on_bad_step=OnBadStep.ROLLBACK, rollback_batches=3)
    jump = {"loss": 9.0, "gradient_norm": 1.0}

    def returned(step, *, saved):
        with pytest.raises(session.RollBack, match="the loss jumped to 9.000, over 1.5") as raised:
            back.bad(step, jump)
        return back.returned(raised.value, to=saved)

    assert returned(20, saved=10) == range(18, 21)
    assert returned(21, saved=10) == range(19, 22)
    assert sorted(back.left_out) == [3, 18, 19, 20, 21]
    with pytest.raises(RunFailed, match="stopped after 2 returns"):
        back.bad(22, jump)
    back.saved()
    assert returned(12, saved=11) == range(12, 13)
    said = "the gradient norm is inf: stopped; with train.on_bad_step=skip or rollb"
    with pytest.raises(RunFailed, match=said):
        limits().bad(1, {"loss": 1.0, "gradient_norm": float("inf")})


SPIKE = 20
STEPS = 32
SETTINGS = f"""
    train.steps={STEPS} train.checkpoint_every=8 train.evaluate_every=0 train.evaluation_batches=1
    train.keep_checkpoints=9 mesh.tensor=2 train.spike_factor=1.25 train.spike_window=8
    train.rollback_batches=3 run.tensorboard=false
""".split()


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of which the windows that a step trains on are noise: its loss jumps."""
    content = "".join(f"line {i} of a book on {i % 7} things\n" for i in range(2000)).encode()
    noisy = bytearray(content)
    settings = config.load("tiny", overrides=runs.TINY)
    count = len(content) - int(len(content) * settings.data.validation_fraction)
    windows = dataset.windows(np.arange(count, dtype=np.int32), settings.train.sequence)
    rows, batch = dataset.shuffled(windows, seed=settings.train.seed), settings.train.batch
    for index in range((SPIKE - 1) * batch, SPIKE * batch):
        start = rows[index][0]
        noisy[start : start + 33] = np.random.default_rng(start).integers(65, 91, 33).tolist()
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_bytes(noisy)
    return path


def run(book, directory, *more):
    said = []
    runs.run(book, directory, *SETTINGS, *more, say=said.append)
    return said


def losses(directory):
    return [(row["step"], row["loss"], row.get("event")) for row in metrics.read(directory)]


def position(directory, step):
    return json.loads((directory / "checkpoints" / str(step) / "data/metadata").read_text())


@pytest.fixture(scope="module")
def stopped(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stop") / "run"
    with pytest.raises(
        RunFailed,
        match="step 20: the loss jumped to .*: stopped; with train.on_bad_step=skip",
    ):
        run(book, directory)
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


@pytest.mark.parametrize("before", ["stopped", "skipped"])
def test_a_resumed_run_goes_on_alike(before, book, skipped, tmp_path, request):
    """Also one that was stopped by another policy. The mean that a jump is measured against is part
    of the checkpoint, as is what was left out.
    """
    directory = shutil.copytree(request.getfixturevalue(before), tmp_path / "run")
    shutil.rmtree(directory / "checkpoints" / str(STEPS), ignore_errors=True)
    run(book, directory, "train.on_bad_step=skip")
    assert losses(directory) == losses(skipped)
    assert position(directory, STEPS)["skipped"] == [SPIKE]


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
    pace = {row["step"]: row["tokens_per_second"] for row in metrics.read(directory)}
    assert [step for step in pace if pace[step] == 0] == [18, 19, 20]
    assert rows[20][1] is not None
    assert rows[20] != losses(skipped)[20]
    assert position(directory, 24)["skipped"] == [18, 19, 20]
    for path in (directory / "checkpoints").iterdir():
        if int(path.name) > 16:
            shutil.rmtree(path)
    run(book, directory, "train.on_bad_step=rollback")
    assert losses(directory) == rows


def test_no_number_at_all(book, tmp_path):
    """A learning rate that ends every run: stopped after too many returns to the beginning."""
    wild = ["train.learning_rate=1e30", "train.spike_factor=0", "train.warmup_steps=0"]
    wild += ["train.on_bad_step=rollback", "train.max_bad_steps=3"]
    with pytest.raises(RunFailed, match="stopped after 3 returns"):
        run(book, tmp_path, *wild)
