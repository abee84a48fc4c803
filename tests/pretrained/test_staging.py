"""The folder beside the destination, which somebody else may have made first."""

import os
import signal

import pytest

from ladder_jax.errors import Stopped
from ladder_jax.pretrained import staging


@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "another user's"])
def test_a_staging_folder_that_was_there_before(kind, small, tmp_path, mistake, monkeypatch):
    """Its name can be foreseen by whoever can write there: what it leads to keeps its files."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    planted = tmp_path / ".out.converting"
    if kind == "link":
        planted.symlink_to(mine)
    elif kind == "dangling link":
        planted.symlink_to(tmp_path / "nowhere")
    elif kind == "file":
        (mine / "file").rename(planted)
    else:
        mine.rename(planted)
        monkeypatch.setattr(os, "geteuid", lambda: planted.stat().st_uid + 1)
    assert ".out.converting' is in the way: " in mistake("convert", small, tmp_path / "out")
    files = [file for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink()]
    assert [file.read_text() for file in files] == ["mine"]


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_sigterm_before_or_after_the_rename(name, resumes, tmp_path, monkeypatch):
    """There is nothing, or the whole, and the message says which; work that can go on may leave its
    own folder.
    """
    real = getattr(os, name)

    def write():
        with staging.staged(tmp_path / "out", resumes=resumes) as folder:
            folder.mkdir()
            (folder / "file").write_text("whole")
            (folder.parent / "kept").touch()

    def then_stopped(*args, **kwargs):
        result = real(*args, **kwargs)
        signal.raise_signal(signal.SIGTERM)
        return result

    with monkeypatch.context() as patched, pytest.raises(Stopped) as stopped:
        patched.setattr(os, name, then_stopped)
        write()
    assert stopped.value.status == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    names = lambda: {path.name for path in tmp_path.rglob("*")}
    left, said = names(), str(stopped.value)
    if "was written" in said:
        assert left == {"out", "file"}
        return
    assert name != "rename"
    assert "was not written" in said
    assert ("goes on" in said) == resumes
    assert left <= {".out.converting", staging.LOCK, "kept"} if resumes else not left
    write()
    assert names() == {"out", "file"}


def test_sigterm_within_compiled_code(tmp_path):
    """There another error takes the place of what SIGTERM raises, as SystemError in
    `np.fromfile`.
    """
    with pytest.raises(Stopped, match="out' was not written"), staging.staged(tmp_path / "out"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as received:
            assert not isinstance(received, Exception)  # which many a library catches
            raise SystemError("returned a result with an exception set") from received
    assert not any(tmp_path.iterdir())
