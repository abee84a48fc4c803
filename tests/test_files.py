"""Files that a command writes: what is refused before the work, and what is left of a failure."""

import os
import pathlib
import tempfile
from unittest import mock

import jax
import pytest

from ladder_jax import files, pretrained
from ladder_jax.errors import RunFailed
from ladder_jax.parallel import use_compilation_cache
from tests.pretrained import models
from tests.refusals import refused


def write(path):
    pathlib.Path(path).write_text("new")


@pytest.mark.parametrize(
    "error, said",
    [
        (ValueError("a mistake"), "a mistake"),
        (OSError(28, os.strerror(28)), "a.json was not written: No space left on device"),
    ],
)
def test_whole_or_not_at_all(tmp_path, error, said):
    file = tmp_path / "a.json"
    file.write_text("old")

    def fails(path):
        write(path)
        raise error

    with pytest.raises((ValueError, RunFailed), match=said):
        files.write_atomically(str(file), fails)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
    files.write_atomically(str(file), write)
    assert file.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    target = tmp_path / "there/target.json"
    link = tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    files.check_writable("out", str(link))
    files.write_atomically(str(link), write)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["target.json"]


def test_a_folder_below_that_cannot_be_read(tmp_path, monkeypatch):
    """Its files would be left out without a word, as would those of a link to a folder."""
    (tmp_path / "open").mkdir()
    write(tmp_path / "open/a.txt")
    (tmp_path / "open/loop").symlink_to(tmp_path)
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut/link").symlink_to(tmp_path / "open")
    assert files.below(tmp_path, data=True) == [tmp_path / "open/a.txt"]
    assert files.below(tmp_path / "shut") == []
    assert files.below(tmp_path / "shut", data=True) == [tmp_path / "shut/link/a.txt"]
    with refused("'/dev/null': this is a device or a pipe; name a file"):
        files.below(pathlib.Path("/dev/null"))
    scan = os.scandir  # root may read anything

    def scandir(folder):
        if str(folder).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with refused("cannot read '.*/shut': Permission denied"):
        files.below(tmp_path)


def test_what_cannot_be_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("")
    for name, message in {
        "pipe": "this is a device or a pipe; name a file",
        "": "this is a folder; name a file in it",
        "nowhere/file": "there is no folder",
    }.items():
        with refused(f"--out .*: {message}"):
            files.check_writable("out", str(tmp_path / name))
    files.check_writable("out", str(tmp_path / "file"))
    if os.geteuid():  # root may write anything
        (tmp_path / "file").chmod(0o400)
        with refused("this file cannot be written"):
            files.check_writable("out", str(tmp_path / "file"))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_it(tmp_path, umask):
    """As before; a new file as the user wants new files to be. Never more while it is written."""
    seen = []

    def look(path):
        seen.append(os.stat(path).st_mode & 0o777)
        write(path)

    before = os.umask(umask)
    try:
        for mode in (None, 0o600, 0o640, 0o666):
            file = tmp_path / str(mode)
            if mode is not None:
                file.write_text("old")
                file.chmod(mode)
            files.write_atomically(str(file), look)
            wanted = 0o666 & ~umask if mode is None else mode
            assert file.stat().st_mode & 0o777 == wanted == seen[-1]
            assert file.read_text() == "new"
    finally:
        os.umask(before)


@pytest.mark.parametrize("why", ["no home", "no such user", "a file", "read-only"])
def test_no_cache(why, tmp_path, monkeypatch):
    """What would be kept is made again each time: nothing else is different."""
    monkeypatch.setattr("matplotlib.use", mock.Mock(side_effect=OSError("set MPLCONFIGDIR")))
    for name in ("LADDER_JAX_CACHE", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    match why:
        case "no home":
            monkeypatch.setenv("HOME", str(tmp_path / "file"))
        case "no such user":
            monkeypatch.delenv("HOME")
            monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        case "a file":
            monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "file"))
        case "read-only":
            monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert files.cache_folder("x") is None
    monkeypatch.setattr(jax.config, "update", None)  # not called
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == before
    with files.cache("x") as folder:
        (folder / "kept").touch()
    assert not folder.exists()
    monkeypatch.setattr(tempfile, "mkdtemp", mock.Mock(side_effect=OSError(2, "No usable folder")))
    with pytest.raises(RunFailed, match="^No usable folder: set TMPDIR"), files.cache("x"):
        pass
    with refused("--plot a.png: a picture needs matplotlib: set MPLCONFIGDIR"):
        files.pyplot("--plot a.png")


def test_the_cache_of_a_users_home(tmp_path, monkeypatch):
    """A tilde that no shell has replaced, as in a Dockerfile's ENV."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LADDER_JAX_CACHE", "~/kept")
    assert files.cache_folder("x") == tmp_path / "home/kept/x"
    monkeypatch.delenv("LADDER_JAX_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_folder("x") == tmp_path / "home/.cache" / "ladder_jax/x"
    assert os.listdir(tmp_path) == ["home"]


@pytest.mark.parametrize("words", ["convert model gs://b/x", "tokenize t.txt --out s3://b/x"])
def test_an_address_is_no_folder_here(words, tmp_path, mistake):
    """It was one of that name, `gs:`, and the command said that it was done."""
    models.write(tmp_path / "model", "llama-2")
    (tmp_path / "t.txt").write_text("text")
    before = os.listdir(tmp_path)
    said = f"{words.split()[-1]!r} is in an object store, and this must be on a disk"
    assert said in mistake(*words.split())
    with refused("'gs://b/x' is in an object store"):
        pretrained.write_huggingface(pretrained.open("model"), "gs://b/x")
    assert os.listdir(tmp_path) == before


def test_a_tilde_without_a_user_is_a_name(mistake):
    nobody = "~nobody-of-this-name/book.txt"
    assert files.expanded(nobody) == pathlib.Path(nobody)
    said = mistake("tokenize", nobody, "--tokenizer", "bytes", "--out", "store")
    assert f"{nobody!r} does not exist" in said


@pytest.mark.parametrize("settings", ["", """ [spec='{"a": true}']"""])
def test_the_reason_of_a_disk_is_the_systems(settings):
    """tensorstore writes what it tried before the system's error, and sometimes its settings behind
    it.
    """
    error = ValueError(
        f"OUT_OF_RANGE: Failed to write: {os.strerror(27)}{settings} [os_error_code='27']"
    )
    assert files.reason(error) == os.strerror(27)
