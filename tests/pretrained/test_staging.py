"""The folder beside the destination, which somebody else may have made first."""

import os

import pytest

from ladder_jax.cli import main
from ladder_jax.errors import RunFailed
from ladder_jax.pretrained.convert import native
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


def test_folders_above_the_destination(small, tmp_path, monkeypatch, capsys):
    """They are created, as for `train`, and gone again after a failure."""
    destination = tmp_path / "runs" / "new" / "out"
    with monkeypatch.context() as failing:

        def fail(source, folder, **_):
            assert folder.parent.is_dir()
            raise RunFailed("the disk is gone")

        failing.setattr(native, "write", fail)
        assert main(["convert", str(small), str(destination)]) == 1
    assert not any(tmp_path.iterdir())
    assert main(["convert", str(small), str(destination)]) == 0
    assert [path.name for path in destination.parent.iterdir()] == ["out"]
