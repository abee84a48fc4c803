"""One run on two processes, as on a pod: one checkpoint, one log, one end."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from ladder_jax import config, train
from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics

TINY = ["model.num_layers=2", "model.d_model=32", "model.d_ff=32", "model.dtype=float32", "train.steps=40",
        "train.batch=4", "train.sequence=32", "train.log_every=1", "train.checkpoint_every=15", "train.warmup_steps=5",
        "train.evaluate_every=20", "train.evaluation_batches=1", "mesh.data=2"]  # fmt: skip

PROCESS = """
import sys, time
import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from ladder_jax import config, train
from ladder_jax.errors import RunFailed
from ladder_jax.train import metrics

slowly = metrics.Metrics.add
metrics.Metrics.add = lambda self, row: (time.sleep(0.05), slowly(self, row))[1]
try:
    result = train.run(config.load("tiny", overrides=sys.argv[3:]), say=lambda line: print(line, flush=True))
    print("finished", result.steps, result.validation_loss)
except RunFailed as error:
    print(error)
    sys.exit(error.status)
"""


def start(overrides):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    arguments = [[sys.executable, "-c", PROCESS, address, str(index), *overrides] for index in range(2)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    return [subprocess.Popen(one, **pipes) for one in arguments]


def test_one_process_is_preempted_and_both_save(tmp_path):
    """SIGTERM to the second alone; then both go on, to the losses of one process with two devices."""
    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i} of a little book about {i % 7} things\n" for i in range(500)))
    overrides = [*TINY, f"data.path={book}"]
    run = tmp_path / "run"
    first, second = start([*overrides, f"run.dir={run}"])
    deadline = time.monotonic() + 120
    while len(metrics.read(run)) < 18 and time.monotonic() < deadline and second.poll() is None:
        time.sleep(0.02)
    second.send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [143, 143], said
    stopped = metrics.read(run)[-1]["step"]
    assert (
        18 <= stopped < 40
        and steps(run / "checkpoints")[-1] == stopped
        and verify(run / "checkpoints" / str(stopped)) == []
    )
    assert all(f"SIGTERM: step {stopped} is saved" in out for out, _ in said)

    both = start([*overrides, f"run.dir={run}"])
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    # The second neither logs nor shows.
    assert f"resuming {run} from step {stopped}" in said[0][0]
    assert [line for line in said[1][0].splitlines() if "Gloo" not in line] == [said[0][0].splitlines()[-1]]
    alone = tmp_path / "alone"
    train.run(config.load("tiny", overrides=[*overrides, f"run.dir={alone}"]), say=lambda line: None)
    ours, theirs = metrics.read(run), metrics.read(alone)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs] == list(range(1, 41))
    for key in ("loss", "validation_loss"):
        found = [[row[key] for row in rows if key in row] for rows in (ours, theirs)]
        assert found[0] == pytest.approx(found[1], rel=1e-5) and len(found[0]) == (40 if key == "loss" else 2)
