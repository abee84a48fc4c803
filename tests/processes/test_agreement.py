"""What is wrong in one process is told to all: they go on from the same step, or fail with the same
line, in time.
"""

import json
import shutil
import subprocess
import sys
import threading

import pytest

from ladder_jax.checkpoint import steps, verify
from ladder_jax.train import metrics
from tests import cases, runs
from tests.processes.conftest import free_port, spawning

STEPS = 6
EVERY = 2
SETTINGS = f"""
    train.steps={STEPS} train.checkpoint_every={EVERY} train.keep_checkpoints=9 train.evaluation_batches=1
    run.tensorboard=false train.on_bad_step=rollback train.rollback_batches=1
""".split()
TIMEOUT = 20.0


@pytest.fixture(scope="module")
def whole(book, tmp_path_factory):
    """A run of one process with four devices to its end, with the checkpoints of steps 2, 4 and
    6.
    """
    run = tmp_path_factory.mktemp("whole") / "run"
    runs.run(book, run, *SETTINGS, "mesh.data=4")
    return run


@pytest.fixture
def stood(whole, tmp_path):
    """A copy as it stood after step 4 or so: its checkpoints are those of steps 2 and 4."""

    def copy(name):
        run = shutil.copytree(whole, tmp_path / name)
        shutil.rmtree(run / "checkpoints/6")
        return run

    return copy


@pytest.fixture(scope="module")
def both():
    """Two processes that have joined: they are started once, for several tests."""
    command = [sys.executable, "-m", "tests.processes.agreeing", f"localhost:{free_port()}", "2"]
    with spawning(stdin=subprocess.PIPE) as spawn:
        yield [spawn([*command, str(process)], JAX_NUM_CPU_DEVICES="1") for process in range(2)]


@pytest.fixture
def told(book, both):
    """Makes runs, one after the other, in two processes; what each process tells of each run, by
    run.
    """

    def answers(process):
        """Lines of JSON, among what native code prints."""
        return (json.loads(line) for line in process.stdout if line.startswith("{"))

    def run(*asked, timeout=240):
        late = threading.Timer(timeout, lambda: [process.kill() for process in both])
        late.start()
        try:
            for folder, wrong, more in asked:
                overrides = runs.words(book, folder, *SETTINGS, "mesh.data=2", *more)
                line = json.dumps(dict(overrides=overrides, wrong=wrong, timeout=TIMEOUT))
                for process in both:
                    print(line, file=process.stdin, flush=True)
            found = [[next(answers(process), None) for process in both] for _ in asked]
            assert all(all(one) for one in found), (
                f"a process has ended, or made no run in {timeout} s"
            )
            return found
        finally:
            late.cancel()

    return run


def alike(found, *, step, losses, whole):
    """All went on from `step`, made the same steps with the losses of the whole run, and ended with
    the same values.

    Sums of float32 in another order: 32 rows of 4 each, so a relative error of 128 units of
    roundoff at most, 2^-24 each, which a few steps multiply; 1e-5 is a little more.
    """
    expected = {row["step"]: row["loss"] for row in metrics.read(whole)}
    for one in found:
        assert one["error"] is None
        assert one["from"] == [step]
        assert one["digest"] == found[0]["digest"]
        assert one["losses"] == found[0]["losses"]
        assert [int(step) for step in one["losses"]] == losses
        for number, loss in one["losses"].items():
            assert loss == pytest.approx(expected[int(number)], rel=1e-5)
        assert one["seconds"] < 3 * TIMEOUT


def test_two_processes_resume_alike(told, stood, whole):
    """A flipped bit, and a listing that process 1 sees late: both times from the same step.

    With run.on_damaged=previous the damaged checkpoint no longer counts, and is made again.
    """
    flipped = stood("flipped")
    late = stood("late")
    cases.flip(flipped / "checkpoints/4")
    one, two = told(
        (flipped, {}, ["run.on_damaged=previous"]),
        (late, {"late": {"path": str(late / "checkpoints/4"), "of": 1, "seconds": 4}}, []),
    )
    alike(one, step=2, losses=[3, 4, 5, 6], whole=whole)
    alike(two, step=4, losses=[5, 6], whole=whole)
    for run in (flipped, late):
        assert {path.name for path in (run / "checkpoints").iterdir()} == {"2", "4", "6"}
        assert all(
            verify(run / "checkpoints" / str(step)) == [] for step in steps(run / "checkpoints")
        )


def test_two_processes_fail_alike(told, stood, tmp_path):
    """A flipped bit where that ends the run, a file that process 1 never sees, one that lost its
    data, and a folder on a disk of process 0 alone, where no checkpoint could be written.
    """
    flipped, unseen, other = (stood(name) for name in ("flipped", "unseen", "other"))
    cases.flip(flipped / "checkpoints/4")
    lost = str(unseen / "checkpoints/4" / "params/manifest.ocdbt")
    config_file = other / "config.json"
    book = json.loads(config_file.read_text())["data"]["path"]
    found = told(
        (flipped, {}, []),
        (unseen, {"hidden": {"path": lost, "of": 1}}, []),
        (other, {"hidden": {"path": book, "of": 1}}, []),
        (tmp_path / "alone", {"hidden": {"path": str(tmp_path / "alone"), "of": 1}}, []),
    )
    lines = (
        "other contents than were written",
        "manifest.ocdbt is missing",
        "book.txt",
        "run.dir must lie on a file system that all hosts share",
    )
    for both, line in zip(found, lines, strict=True):
        error, other = (one["error"] for one in both)
        assert error == other and error.startswith("UserError: "), both
        assert line in error
        assert "\n" not in error
        assert ("(process 1 of 2)" in error) == (both is not found[0])
        assert all(one["from"] == [] and one["seconds"] < 3 * TIMEOUT for one in both)


def test_a_disk_is_full_in_one_of_two(told, stood, tmp_path, whole):
    """The save fails in both, and the next ones succeed; where all fail, both end with the same
    line.

    After a return to the last checkpoint, which process 1 sees late, both go on from that one.
    """
    once = tmp_path / "once"
    always = tmp_path / "always"
    newest = str(once / "checkpoints/4")
    one, two = told(
        (once, {"full": {"of": 1, "saves": 1}, "bad": {"step": 5, "path": newest, "of": 1}}, []),
        (always, {"full": {"of": 1, "saves": 9}}, []),
    )
    reason = "could not be written: No space left on device (process 1 of 2)"
    assert [found["error"] for found in one] == [None, None]
    assert [found["from"] for found in one] == [[4], [4]]
    assert one[0]["digest"] == one[1]["digest"]
    assert any(f"the checkpoint of step 2 {reason}" in line for line in one[0]["said"])
    assert steps(once / "checkpoints") == [4, 6]
    assert verify(once / "checkpoints/6") == []
    line = f"RunFailed: the checkpoint of step 6 {reason}"
    line += "; the same command goes on from there"
    assert [found["error"] for found in two] == [line, line]
    assert list((always / "checkpoints").iterdir()) == []
    assert all(found["seconds"] < 3 * TIMEOUT for found in (*one, *two))
