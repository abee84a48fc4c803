"""The processes that a command starts: our own code, and nothing that lies in the current
folder.
"""

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import threading
import time

import pytest

from ladder_jax import python
from tests.changed import ROOT
from tests.processes.conftest import free_port

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
}


SCRIPT = """
import sys
from ladder_jax.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture
def planted(tmp_path_factory):
    """A folder with modules that say that they were executed."""
    tmp_path = tmp_path_factory.mktemp("planted")
    for name in ("jax", "struct", "json", "multiprocessing", "numpy", "ladder_jax"):
        lines = (
            "import os",
            f"os.close(os.open({str(tmp_path / 'executed')!r}, os.O_CREAT))",
            "raise ImportError",
        )
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


@pytest.fixture
def ladder(tmp_path, run_python):
    """As the installed `ladder-jax`, which has its own folder in its path and not the current
    one.
    """
    script = tmp_path / "ladder-jax"
    script.write_text(SCRIPT)
    return functools.partial(run_python, script, PYTHONPATH=str(ROOT))


def test_an_interrupt_is_the_parents():
    """Of a worker that still begins, Ctrl-C showed the traceback."""
    worker = multiprocessing.get_context("spawn").Process(
        target=signal.raise_signal, args=(signal.SIGINT,)
    )
    with python.starting():
        worker.start()
    worker.join()
    assert worker.exitcode == 0


def test_an_interrupt_waits_until_processes_have_begun():
    """Also one that another thread receives: a worker that was begun in part showed a traceback."""
    done = threading.Event()
    threading.Thread(target=done.wait).start()
    with pytest.raises(KeyboardInterrupt), python.starting():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        done.set()
    assert done.is_set()


def test_overlap(ladder, planted):
    words = "--model tiny --target cpu:2 --phase decode --residual ladder --layers 1 --context 32".split()
    done = ladder("overlap", *words, cwd=planted, LADDER_JAX_CACHE=str(planted / "cache"))
    assert done.returncode == 0, done.stderr
    assert not (planted / "executed").exists()
    assert list(planted.glob("cache/schedules/*.json.gz"))


def test_tokenize(ladder, planted):
    done = ladder("tokenize", "text.jsonl", "--out", "out", "--workers", "2", cwd=planted)
    assert done.stdout == "out: 1 documents, 1 tokens of bytes\n", done.stderr
    assert not (planted / "executed").exists()


def test_train(ladder, planted):
    """The look for a cluster, and the workers: both get as far as the data, which is not there."""
    told = {**SLURM, "LADDER_JAX_COORDINATOR": f"localhost:{free_port()}"}
    words = ["train", "tiny", "data.path=nowhere.txt", "mesh.data=2", "--cpu-devices", "1"]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        start = lambda process: ladder(
            *words, cwd=planted, **told, SLURM_PROCID=process, SLURM_LOCALID=process
        )
        both = list(threads.map(start, "01"))
    assert any("nowhere.txt" in done.stderr for done in both), both
    assert [done.returncode for done in both] == [2, 2] and not (planted / "executed").exists(), (
        both
    )
