"""Runs that are killed, preempted, starved of disk and fed with damage: what they lose, and what they say."""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ladder_jax import config, train
from ladder_jax.checkpoint import Damaged
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.train import metrics
from tests import cases

STEPS, SAVE, EVALUATE = 90, 15, 5
TINY = [
    "model.num_layers=2", "model.d_model=32", "model.d_ff=32", "model.dtype=float32", "mesh.tensor=2",
    f"train.steps={STEPS}", "train.batch=4", "train.sequence=32", "train.warmup_steps=5", "train.log_every=1",
    f"train.checkpoint_every={SAVE}", f"train.evaluate_every={EVALUATE}", "train.evaluation_batches=40",
    "train.keep_checkpoints=2",
]  # fmt: skip
KILLS = 20


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text("".join(f"line {i} of a little book about {i % 7} things\n" for i in range(2000)))
    return path


def command(book, directory, *more):
    arguments = [*TINY, f"data.path={book}", f"run.dir={directory}", *more]
    return [sys.executable, "-m", "ladder_jax", "train", "tiny", "--cpu-devices", "2", *arguments]


def start(book, directory, *more):
    return subprocess.Popen(
        command(book, directory, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(book, directory, *more, status=0):
    done = subprocess.run(command(book, directory, *more), capture_output=True, text=True, timeout=300)
    assert done.returncode == status, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def settings(book, directory, *more):
    return config.load("tiny", overrides=[*TINY, f"data.path={book}", f"run.dir={directory}", *more])


def losses(directory):
    return [(row["step"], row["loss"], row.get("validation_loss")) for row in metrics.read(directory)]


def last_step(directory):
    rows = metrics.read(directory)
    return rows[-1]["step"] if rows else 0


def wait(process, condition, *, timeout=120):
    """Until `condition()` holds; whether it did before the process ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    raise AssertionError("nothing happened")


@pytest.fixture(scope="module")
def uninterrupted(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    done = finish(book, directory)
    assert f"step {STEPS}/{STEPS}" in done.stderr and "goodput" in done.stderr
    rows = losses(directory)
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    assert [step for step, _, held_out in rows if held_out is not None] == list(range(EVALUATE, STEPS + 1, EVALUATE))
    return directory


def being_written(directory):
    return {path.stat().st_ino for path in directory.glob("checkpoints/writing.*.orbax*") if path.exists()}


def test_killed_again_and_again(book, tmp_path, uninterrupted):
    """SIGKILL in steps, saves and evaluations, until a run has died 20 times: the losses are bit-identical."""
    directory, moments = tmp_path / "run", random.Random(0)
    died = {"step": 0, "save": 0, "evaluation": 0}
    while sum(died.values()) < KILLS:
        kind = min(died, key=died.get)  # the one with the fewest
        resumed = max([0, *(int(p.name) for p in directory.glob("checkpoints/*") if p.name.isdigit())])
        left, target = being_written(directory), resumed + moments.randint(1, SAVE - 2)
        process = start(book, directory)

        def there():
            """The moment that this life is to end in."""
            if kind == "save":
                return being_written(directory) - left
            step = last_step(directory)
            return target <= step < resumed + SAVE and (kind == "step" or (step + 1) % EVALUATE == 0)

        # What was logged after the checkpoint is there until the new process has dropped it.
        wait(process, lambda: last_step(directory) <= resumed)
        if wait(process, there):
            time.sleep(moments.uniform(0, 0.02))
            process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            evaluating = (last_step(directory) + 1) % EVALUATE == 0
            died["save" if being_written(directory) - left else "evaluation" if evaluating else "step"] += 1
        else:  # it came to its end first
            shutil.rmtree(directory)
    print(died)
    assert min(died.values()) >= 4, died
    finish(book, directory)
    assert losses(directory) == losses(uninterrupted)
    # On another mesh: the same batches, so the same losses but for rounding.
    last = max(int(p.name) for p in directory.glob("checkpoints/*"))
    shutil.rmtree(directory / "checkpoints" / str(last))
    (resumed,) = (int(p.name) for p in directory.glob("checkpoints/*"))
    finish(book, directory, "mesh.tensor=1", "mesh.data=2")
    for ours, theirs in zip(losses(directory), losses(uninterrupted), strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-4 if ours[0] > resumed else 0)
