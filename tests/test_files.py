"""Files that a command writes: what is refused before the work, and what is left of a failure."""

import os
import pathlib

import pytest

from ladder_jax import files
from ladder_jax.errors import RunFailed, UserError


def write(path):
    pathlib.Path(path).write_text("new")


def test_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")

    def fails(path):
        write(path)
        raise ValueError("no")

    with pytest.raises(ValueError):
        files.write_atomically(str(file), fails)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["a.json"]
    files.write_atomically(str(file), write)
    assert file.read_text() == "new" and os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    files.check_writable("out", str(link))
    files.write_atomically(str(link), write)
    assert link.is_symlink() and target.read_text() == "new" and os.listdir(tmp_path / "there") == ["target.json"]


def test_a_full_disk_is_one_line(tmp_path):
    def full(path):
        raise OSError(28, "No space left on device", path)

    file = tmp_path / "a.json"
    with pytest.raises(RunFailed, match="a.json was not written: No space left on device"):
        files.write_atomically(str(file), full)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for name, message in {
        "pipe": "this is a device or a pipe; name a file",
        "": "this is a folder; name a file in it",
        "nowhere/file": "there is no folder",
    }.items():
        with pytest.raises(UserError, match=f"--out .*: {message}"):
            files.check_writable("out", str(tmp_path / name))
    files.check_writable("out", str(tmp_path / "file"))
    if os.geteuid():  # root may write anything
        (tmp_path / "file").chmod(0o400)
        with pytest.raises(UserError, match="this file cannot be read and written"):
            files.check_writable("out", str(tmp_path / "file"))


def test_two_options_one_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    files.check_apart(out="a", plot=None, trace="b")
    with pytest.raises(UserError, match="--plot .*: --out is the same file"):
        files.check_apart(out=str(tmp_path / "a"), plot=str(tmp_path / "link"))
