"""A checkpoint's manifest."""

import os

from ladder_jax.checkpoint import manifest


def test_what_is_no_manifest(tmp_path):
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "file").write_text("f")
    manifest.write(folder)
    assert manifest.problems(folder) == []
    for content in ("[" * 100_000, "{}", "[]", '{"files": 5}'):
        (folder / "manifest.json").write_text(content)
        assert manifest.problems(folder) == ["manifest.json is damaged"]


def test_files_and_folders_are_on_the_disk_when_a_manifest_is_written(monkeypatch, tmp_path):
    """A machine that loses its power then has lost no file's content, and no folder's entry."""
    folder = tmp_path / "1"
    (folder / "params/layers").mkdir(parents=True)
    for name in ("config.json", "params/index", "params/layers/0"):
        (folder / name).write_text("content")
    synced = set()
    sync = os.fsync

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    manifest.write(folder)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_ino in synced, path
