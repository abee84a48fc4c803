"""A checkpoint's manifest: whoever can write to a folder can write one."""

import hashlib
import json
import os

from ladder_jax.checkpoint import manifest


def digest(content):
    return hashlib.blake2b(content, digest_size=16).hexdigest()


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
    for name in ("../other", str(tmp_path / "other"), "sub/../../other"):
        files = told["files"] | {name: {"size": 1, "digest": digest(b"o")}}
        (folder / "manifest.json").write_text(json.dumps(manifest._signed(files)))
        assert manifest.problems(folder) == ["manifest.json is damaged"]
    os.mkfifo(folder / "pipe")
    files = told["files"] | {"pipe": {"size": 0, "digest": digest(b"")}}
    (folder / "manifest.json").write_text(json.dumps(manifest._signed(files)))
    assert manifest.problems(folder) == ["pipe is missing"]
    (folder / "manifest.json").write_text("[" * 100_000)
    assert manifest.problems(folder) == ["manifest.json is damaged"]
