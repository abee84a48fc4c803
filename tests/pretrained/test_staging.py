"""The folder beside the destination, which somebody else may have made first."""

import fcntl
import os
import pathlib
import shutil
import signal
import time

import pytest

from ladder_jax.cli import main
from ladder_jax.errors import Stopped
from ladder_jax.pretrained import staging
from tests.pretrained import gguf_files


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return gguf_files.write(tmp_path_factory.mktemp("small") / "small.gguf", "llama-2")


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "another user's"])
def test_a_staging_folder_that_was_there_before(kind, small, tmp_path, capsys, monkeypatch):
    """Its name can be foreseen by whoever can write there: what it leads to keeps its files."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    planted = tmp_path / ".out.converting"
    match kind:
        case "link":
            planted.symlink_to(tmp_path / "mine")
        case "dangling link":
            planted.symlink_to(tmp_path / "nowhere")
        case "file":
            planted.write_text("mine")
        case "another user's":
            (tmp_path / "mine").rename(planted)
            monkeypatch.setattr(os, "geteuid", lambda: planted.stat().st_uid + 1)
    assert main(["convert", str(small), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert ".out.converting' is in the way: " in said and said.count("\n") == 1
    files = [file for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink()]
    assert [file.read_text() for file in files] == ["mine"] * (2 if kind == "file" else 1)
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "out").exists()


MOMENTS = {
    "the temporary folder is made": (pathlib.Path, "mkdir", 1),
    "locked": (fcntl, "flock", 0),
    "the block": (pathlib.Path, "write_text", 0),
    "a file is synced": (os, "fsync", 0),
    "renamed": (os, "rename", 0),
    "removed": (shutil, "rmtree", -1),
    "unlocked": (os, "close", -1),
}
"""By what was just done, a function and which of its calls: one SIGTERM comes before it, or after it."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_at_any_moment(moment, resumes, when, tmp_path, monkeypatch):
    """There is nothing, or the whole, and the message says which; work that can go on may leave its own folder."""
    where, name, which = MOMENTS[moment]
    destination = tmp_path / "out"

    def write():
        with staging.staged(destination, resumes=resumes) as folder:
            folder.mkdir()
            (folder / "file").write_text("whole")

    def run(at):
        """Writes, with a SIGTERM at call `at`. How often the function was called, and what was raised."""
        real, calls = getattr(where, name), 0

        def called(*args, **kwargs):
            nonlocal calls
            calls += 1
            now = calls == at
            if now and when == "before":
                signal.raise_signal(signal.SIGTERM)
            try:
                return real(*args, **kwargs)
            finally:
                if now and when == "after":
                    signal.raise_signal(signal.SIGTERM)

        with monkeypatch.context() as patched:
            patched.setattr(where, name, called)
            try:
                write()
            except Stopped as stopped:
                return calls, stopped
        return calls, None

    calls, stopped = run(at=0)
    assert stopped is None and destination.is_dir()
    shutil.rmtree(destination)
    _, stopped = run(at=range(1, calls + 1)[which])
    assert stopped.status == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if "was written" in str(stopped):
        assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
        return
    assert "was not written" in str(stopped)
    left = {path.name for path in tmp_path.rglob("*")}
    assert left <= ({".out.converting", staging.LOCK} if resumes else set())
    write()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


def test_sigterm_within_compiled_code(tmp_path):
    """There another error takes the place of what SIGTERM raises, as SystemError in `np.fromfile`."""
    with pytest.raises(Stopped, match="out' was not written"), staging.staged(tmp_path / "out"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as received:
            assert not isinstance(received, Exception)  # which many a library catches
            raise SystemError("returned a result with an exception set") from received
    assert not any(tmp_path.iterdir())


def test_sigterm_within_a_callback(tmp_path, capsys):
    """What is raised there is ignored, as in jax's callback of the garbage collector: it is raised again."""

    class Closed:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped, match="out' was not written"), staging.staged(tmp_path / "out"):
        Closed()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)
        pytest.fail("SIGTERM was ignored")
    assert not any(tmp_path.iterdir()) and capsys.readouterr().err == ""
