"""`train.run` in a program that has called `jax.distributed.initialize` itself, without a parent
that watches.
"""

import signal
import sys

from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics
from tests import runs
from tests.processes import test_training

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


def test_ctrl_c_in_one_process_makes_both_save(book, tmp_path, port, spawn):
    """jax tells all processes of a SIGTERM, so Ctrl-C becomes one."""
    run = tmp_path / "run"
    # whose program is compiled for the tests of test_training, too
    words = runs.words(book, run, *test_training.SETTINGS, "mesh.data=2")
    command = [sys.executable, "-c", PROCESS, f"localhost:{port}"]
    both = [spawn([*command, str(one), *words], JAX_NUM_CPU_DEVICES="1") for one in range(2)]
    test_training.until(run, 3, processes=both)
    first, second = both
    second.send_signal(signal.SIGINT)
    said = test_training.ended(both)
    assert [first.returncode, second.returncode] == [143, 130], said
    stopped = metrics.read(run)[-1]["step"]
    assert 3 <= stopped < test_training.STEPS
    assert steps(run / "checkpoints")[-1] == stopped
    assert verify(run / "checkpoints" / str(stopped)) == []
    for name, (out, _) in zip(("SIGTERM", "SIGINT"), said):
        assert f"{name}: step {stopped} is saved" in out
