"""`train.run` in a program that has called `jax.distributed.initialize` itself, without a parent
that watches.
"""

import signal
import sys

from tests import runs
from tests.processes import conftest, test_training

PROCESS = """
import os, signal, sys, time
import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from ladder_jax import config, train
from ladder_jax.errors import RunFailed
from ladder_jax.train import metrics

slowly = metrics.Metrics.add
metrics.Metrics.add = lambda self, row: (time.sleep(0.1), slowly(self, row))[1]
early = [signal.SIGINT] if sys.argv[2] == sys.argv[3] else []  # before the step is compiled
stop = lambda doing: early and (os.kill(os.getpid(), early.pop()), time.sleep(3))  # heard after a second
settings = config.load("tiny", overrides=sys.argv[4:])
try:
    train.run(settings, say=lambda line: None, heartbeat=stop)
except RunFailed as error:
    print(error)
    sys.exit(error.status)
"""


def test_ctrl_c_in_one_process_makes_both_save(book, tmp_path, spawn):
    """jax tells all processes of a SIGTERM, so Ctrl-C becomes one. Resumed, they hear it before
    their first step, too.
    """
    run = tmp_path / "run"
    # whose program is compiled for the tests of test_training, too
    words = runs.words(book, run, *test_training.SETTINGS, "mesh.data=2")

    def start(early):
        command = [sys.executable, "-c", PROCESS, f"localhost:{conftest.free_port()}"]
        return [
            spawn([*command, str(one), early, *words], JAX_NUM_CPU_DEVICES="1") for one in range(2)
        ]

    def stopped(both, *, least):
        said = test_training.ended(both)
        assert [process.returncode for process in both] == [143, 130], said
        step = test_training.stopped_at(run, least=least)
        for name, (out, _) in zip(("SIGTERM", "SIGINT"), said):
            assert f"{name}: step {step} is saved" in out
        return step

    both = start("nobody")
    test_training.until(run, 3, processes=both)
    both[1].send_signal(signal.SIGINT)
    first = stopped(both, least=3)
    assert stopped(start("1"), least=first) <= first + 2
