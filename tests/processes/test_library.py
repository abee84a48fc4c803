"""`train.run` in a program that has called `jax.distributed.initialize` itself, without a parent
that watches.
"""

import os
import signal
import subprocess
import sys
import time

from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics
from tests.processes import test_training

TINY = [*test_training.TINY, "mesh.data=2"]  # whose program is compiled for both

PROCESS = """
import sys, time
import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from ladder_jax import config, train
from ladder_jax.errors import RunFailed
from ladder_jax.train import metrics

slowly = metrics.Metrics.add
metrics.Metrics.add = lambda self, row: (time.sleep(0.1), slowly(self, row))[1]
try:
    train.run(config.load("tiny", overrides=sys.argv[3:]), say=lambda line: None)
except RunFailed as error:
    print(error)
    sys.exit(error.status)
"""


def test_ctrl_c_in_one_process_makes_both_save(book, tmp_path, port):
    """jax tells all processes of a SIGTERM, so Ctrl-C becomes one."""
    run = tmp_path / "run"
    overrides = [*TINY, f"data.path={book}", f"run.dir={run}"]
    commands = [
        [sys.executable, "-c", PROCESS, f"localhost:{port}", str(index), *overrides]
        for index in range(2)
    ]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    first, second = (subprocess.Popen(command, **pipes) for command in commands)
    deadline = time.monotonic() + 240
    while len(metrics.read(run)) < 3 and time.monotonic() < deadline and second.poll() is None:
        time.sleep(0.02)
    second.send_signal(signal.SIGINT)
    said = [process.communicate(timeout=240) for process in (first, second)]
    assert [first.returncode, second.returncode] == [143, 130], said
    stopped = metrics.read(run)[-1]["step"]
    assert 3 <= stopped < test_training.STEPS and steps(run / "checkpoints")[-1] == stopped
    assert verify(run / "checkpoints" / str(stopped)) == []
    for name, (out, _) in zip(("SIGTERM", "SIGINT"), said):
        assert f"{name}: step {stopped} is saved" in out
