"""Runs that are killed, preempted, starved of disk and fed with damage: what they lose, and what
they say.
"""

import errno
import fcntl
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ladder_jax import cli
from ladder_jax.checkpoint import Damaged, saved, steps, store
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.train import folder, metrics, session
from tests import cases, runs
from tests.covering import full
from tests.refusals import refused
from tests.runs import losses

STEPS = 45
SAVE = 15
EVALUATE = 5
SETTINGS = f"""
    mesh.tensor=2 train.steps={STEPS} train.checkpoint_every={SAVE} train.evaluate_every={EVALUATE}
    train.evaluation_batches=40
""".split()
# How often a run is to die, and in what. Steps go on while one is saved, so a kill in a save is one
# in a step as well.
KILLS = [
    {"save": 1, "evaluation": 1},
    full({"step": 7, "save": 7, "evaluation": 7}),
]


def command(book, directory, *more):
    return ["train", "tiny", *runs.words(book, directory, *SETTINGS, *more)]


def start(book, directory, *more):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ladder_jax",
            *command(book, directory, *more),
            "--cpu-devices",
            "2",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(book, directory, *more, said=None):
    """What it says, also in `said`."""
    said = [] if said is None else said
    runs.run(book, directory, *SETTINGS, *more, say=said.append)
    return said


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
        time.sleep(0.005)  # as short as what is waited for, and looking costs the run its time
    raise AssertionError("nothing happened")


@pytest.fixture(scope="module")
def uninterrupted(book, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(book, directory)
    return directory


def being_written(directory):
    """The steps whose manifests are still to be written."""
    return set(saved.unfinished_steps(directory / "checkpoints"))


@pytest.fixture
def resumable(uninterrupted, tmp_path):
    """A copy of the run as it stood some steps after its checkpoint of step 30, with that of step
    15 before it.
    """
    directory = shutil.copytree(uninterrupted, tmp_path / "copy")
    checkpoints = directory / "checkpoints"
    shutil.rmtree(checkpoints / "45")
    assert sorted(os.listdir(checkpoints)) == ["15", "30"]
    return directory


@pytest.mark.parametrize("kills", KILLS)
def test_killed_again_and_again(book, resumable, uninterrupted, kills):
    """SIGKILL after step 15, until a run has died that often in each of these: the losses are
    bit-identical. All kills count, those before another checkpoint too.
    """
    directory = resumable
    starts = 1
    moments = random.Random(0)
    shutil.rmtree(directory / "checkpoints/30")
    died = {"step": 0, "save": 0, "evaluation": 0}
    while any(died[kind] < often for kind, often in kills.items()):
        kind = min(kills, key=died.get)  # the one with the fewest
        resumed = max([0, *steps(directory / "checkpoints")])
        left = being_written(directory)
        target = resumed + moments.randint(1, SAVE - 2)
        process = start(book, directory)
        starts += 1

        def moment():
            """What the run is at."""
            if being_written(directory) - left:
                return "save"
            return "step" if (last_step(directory) + 1) % EVALUATE else "evaluation"

        def there():
            """Whether it is the moment that this life is to end in."""
            in_time = target <= last_step(directory) < resumed + SAVE
            return moment() == kind and (in_time or kind == "save")

        # What was logged after the checkpoint is there until the new process has dropped it.
        wait(process, lambda: last_step(directory) <= resumed)
        if wait(process, there):
            time.sleep(moments.uniform(0, 0.02))
            process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            died[moment()] += 1
        else:  # it came to its end first
            shutil.rmtree(directory)
            starts = 0
    run(book, directory)
    assert losses(directory) == losses(uninterrupted)
    assert json.loads((directory / "goodput.json").read_text())["restarts"] == starts


def test_preempted_in_a_save_and_in_an_evaluation(
    book, tmp_path, uninterrupted, monkeypatch, capsys
):
    """SIGTERM: everything is saved, the status is the shell's; the same command goes on. Ctrl-C
    likewise.

    Steps go on during a save, so that is in a step as well. The second is in this process, which
    need not start.
    """
    directory = tmp_path / "run"

    def ended(status, signum, said):
        assert status == 128 + signum and "Traceback" not in said, said
        step = last_step(directory)
        assert (
            f"ladder-jax: {signum.name}: step {step} is saved, and the same command goes on from there"
            in said
        )
        assert (directory / "checkpoints" / str(step)).is_dir()
        assert not being_written(directory)

    process = start(book, directory)
    assert wait(process, lambda: being_written(directory))
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    ended(process.returncode, signal.SIGTERM, said)

    def interrupted(self, *, whole=session.Session._evaluate):
        if last_step(directory) == 34:  # in the evaluation after step 35
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return whole(self)

    monkeypatch.setattr(session.Session, "_evaluate", interrupted)
    ended(cli.main(command(book, directory)), signal.SIGINT, capsys.readouterr().err)
    assert last_step(directory) == 35
    run(book, directory)
    assert losses(directory) == losses(uninterrupted)


def test_the_second_signal_ends_at_once(book, tmp_path):
    """In an evaluation that would take an hour."""
    directory = tmp_path / "run"
    process = start(book, directory, "train.evaluation_batches=1000000")
    assert wait(process, lambda: last_step(directory) >= EVALUATE - 1)
    lines = iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    assert any("SIGTERM: saving, then ending" in line for line in lines)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_full_disk(book, tmp_path, uninterrupted):
    """Room for the log and one checkpoint: the next ones are reported, and that one stays; then
    there is room again.
    """
    disk = tmp_path / "disk"
    directory = disk / "run"
    disk.mkdir()
    size = sum(
        p.stat().st_size for p in (uninterrupted / "checkpoints/45").rglob("*") if p.is_file()
    )
    mount = ["mount", "-t", "tmpfs", "-o", f"size={2 * size}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip(
            "no tmpfs can be mounted here (it needs root); test_a_disk_that_refuses_in_the_middle runs"
        )
    try:
        with pytest.raises(
            RunFailed, match="checkpoint of step 45 could not be written: No space left on device"
        ):
            run(book, directory)
        assert os.listdir(directory / "checkpoints") == ["15"]
        assert len(losses(directory)) == STEPS
        # Not a byte of room: the log waits in memory.
        ballast = disk / "ballast"
        with pytest.raises(OSError, match="No space"), ballast.open("wb") as file:
            while True:
                file.write(b"x" * 512)
                file.flush()
        before = (directory / "metrics.jsonl").read_bytes()
        with pytest.raises(RunFailed, match="config.json was not written: No space left on device"):
            run(book, directory)
        assert (directory / "metrics.jsonl").read_bytes() == before
        subprocess.run([*mount[:4], f"remount,size={20 * size}", str(disk)], check=True)
        run(book, directory)
        assert losses(directory) == losses(uninterrupted)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_refuses_in_the_middle(book, tmp_path, uninterrupted, largest_file):
    """No file may become larger than 40 KiB, so every save fails while it writes; the run says so,
    and why.

    (Its programs are in the compilation cache, where nothing could be written either.)
    """
    said = []
    directory = tmp_path / "run"
    largest_file(40 * 1024)
    with pytest.raises(RunFailed, match="^the checkpoint of step 45 could not be written"):
        run(book, directory, said=said)
    largest_file(None)
    first = "the checkpoint of step 15 could not be written: File too large"
    assert any(first in line for line in said)
    # An abandoned write may leave a folder behind, which does not count, and which the next start
    # removes.
    assert steps(directory / "checkpoints") == []
    assert len(losses(directory)) == STEPS


def test_every_failed_save_is_told(book, tmp_path, monkeypatch):
    """Also where the next one is due before it has failed, and fails as well, at once."""

    def fail(folder, shapes):
        time.sleep(0.5)
        monkeypatch.setattr(store.Store, "_prepare", refuse)
        raise OSError(errno.EIO, "it is broken")

    def refuse(*_):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(store.arrays, "finish", fail)
    said = []
    with pytest.raises(RunFailed, match="the checkpoint of step 45 could not be written: no room"):
        run(book, tmp_path / "run", said=said)
    told = [
        re.search(r"checkpoint of step (\d+) could not be written: ([\w ]+)", line) for line in said
    ]
    assert [found.groups() for found in told if found] == [
        ("15", "it is broken"),
        ("30", "no room"),
    ]


def test_lines_wait_for_room(tmp_path):
    """The log cannot be written for a while, once after half a line: nothing is lost, nothing
    stands twice.
    """
    said = []
    log = metrics.Metrics(metrics.SmallFiles(tmp_path, say=said.append), step=0)
    log.add({"step": 1, "loss": 1.0})
    file = tmp_path / metrics.NAME
    content = file.read_bytes()
    file.rename(tmp_path / "aside")
    file.mkdir()
    log.add({"step": 2, "loss": float("nan")})
    log.add({"step": 3, "loss": 3.0})
    file.rmdir()
    (tmp_path / "aside").rename(file)
    file.write_bytes(content + b'{"step": 2, "lo')
    log.add({"step": 4, "loss": float("inf")})
    assert metrics.read(tmp_path) == [
        {"step": s, "loss": x} for s, x in ((1, 1.0), (2, None), (3, 3.0), (4, None))
    ]
    assert len(said) == 1
    assert "metrics.jsonl cannot be written: Is a directory; its lines are kept" in said[0]


def test_a_damaged_checkpoint_is_never_resumed_from(book, resumable, uninterrupted):
    """Refused, with a way on; taken up, it no longer counts, and the run ends
    as it should.
    """
    checkpoints = resumable / "checkpoints"
    cases.flip(checkpoints / "30/optimizer")
    before = (resumable / "metrics.jsonl").read_bytes()
    with pytest.raises(Damaged, match="other contents than were written .run.on_damaged=previous"):
        run(book, resumable)
    assert (resumable / "metrics.jsonl").read_bytes() == before
    said = run(book, resumable, "run.on_damaged=previous")
    assert any(line.endswith("put aside, its manifest as manifest.damaged.json") for line in said)
    assert f"resuming {resumable} from step 15" in said
    assert losses(resumable) == losses(uninterrupted)
    assert sorted(os.listdir(checkpoints)) == ["15", "30", "45"]


def test_no_whole_checkpoint_is_no_fresh_start(book, resumable):
    for path in (resumable / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{}")
    with pytest.raises(
        Damaged, match="is damaged, and there is no whole one before it: choose another run.dir"
    ):
        run(book, resumable, "run.on_damaged=previous")


def test_a_checkpoint_from_before_there_were_manifests(book, resumable, uninterrupted):
    step = resumable / "checkpoints/30"
    (step / "manifest.json").unlink()
    shutil.rmtree(step / "data")
    meta = json.loads((step / "meta/metadata").read_text())
    old = {key: meta[key] for key in ("format", "version", "step", "config")}
    (step / "meta/metadata").write_text(json.dumps(old))
    assert f"resuming {resumable} from step 30" in run(book, resumable)
    assert losses(resumable) == losses(uninterrupted)


def test_one_process_a_folder(book, resumable):
    """The lock is a regular file, as NFS needs it, which keeps nobody out once its owner has
    ended.
    """
    with folder.locked(resumable, say=print):
        pass
    lock = resumable / ".lock"
    assert lock.is_file()
    assert not lock.stat().st_mode & 0o111
    times = lambda: sorted(p.stat().st_mtime_ns for p in resumable.rglob("*"))
    before = times()
    with lock.open("r+b") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        with refused("another process is training in"):
            run(book, resumable)
    assert times() == before
    with folder.locked(resumable, say=print):
        pass


def test_a_run_whose_folder_is_removed_ends(tmp_path, monkeypatch):
    """Its lock keeps nobody out any more: another one may begin there."""
    monkeypatch.setattr(folder, "RENEWED", 0.05)
    lost = queue.SimpleQueue()
    with folder.locked(tmp_path / "run", say=print, lost=lost.put):
        with pytest.raises(queue.Empty):
            lost.get(timeout=0.3)
        (tmp_path / "run").rename(tmp_path / "old")
        assert lost.get(timeout=60) == f"{str(tmp_path / 'run')!r} was removed or moved"


def test_a_refused_run_leaves_no_folder(tmp_path):
    """That it has made itself: what was there before stays, and so does what a run has begun."""
    new, old, begun = (tmp_path / name for name in ("new", "old", "begun"))
    old.mkdir()
    for where in (new, old, begun):
        with refused("no such model"), folder.locked(where, say=print):
            (where / "goodput.json").write_text("{}")
            if where == begun:
                (where / "config.json").write_text("{}")
            raise UserError("no such model")
    assert not new.exists()
    assert (old / ".lock").exists()
    assert (begun / "goodput.json").exists()
