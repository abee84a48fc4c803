"""A checkpoint's manifest: whoever can write to a folder can write one."""

import hashlib
import json
import os

from ladder_jax.checkpoint import manifest


def test_a_manifest_names_the_checkpoints_files_only(tmp_path):
    """Not those of other folders, whatever their digests are, nor what would never end to be
    read.
    """
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "file").write_text("f")
    (tmp_path / "other").write_text("o")
    manifest.write(folder)
    told = json.loads((folder / "manifest.json").read_text())
    assert manifest.problems(folder) == []

    def problems(name, content):
        """Of a manifest that names this file, too."""
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        files = told["files"] | {name: {"size": len(content), "digest": digest}}
        (folder / "manifest.json").write_text(json.dumps(manifest._signed(files)))
        return manifest.problems(folder)

    for name in ("../other", str(tmp_path / "other"), "sub/../../other"):
        assert problems(name, b"o") == ["manifest.json is damaged"]
    os.mkfifo(folder / "pipe")
    assert problems("pipe", b"") == ["pipe is missing"]
    (folder / "manifest.json").write_text("[" * 100_000)
    assert manifest.problems(folder) == ["manifest.json is damaged"]


def test_files_and_folders_are_on_the_disk_when_a_manifest_is_written(monkeypatch, tmp_path):
    """A machine that loses its power then has lost no file's content, and no folder's entry."""
    folder = tmp_path / "1"
    (folder / "params" / "layers").mkdir(parents=True)
    for name in ("config.json", "params/index", "params/layers/0"):
        (folder / name).write_text("content")
    synced, sync = set(), os.fsync

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    manifest.write(folder)
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_ino in synced, path
