"""`ladder-jax convert`: what it writes is what it read, with the layers that were asked for, whole or not at all."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ladder_jax import checkpoint, nn, parallel, pretrained
from ladder_jax.checkpoint.stream import Stream
from ladder_jax.cli import main
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained import convert as conversion
from ladder_jax.pretrained import formats, staging
from tests import reference
from tests import tokenizers as tiny
from tests.pretrained import gguf_files, models

OPTIONS = "ladder_layers residual ranks dtype calibration calibration_tokens refit ridge search tensor"
ARGUMENTS = dict.fromkeys(OPTIONS.split()) | {"to": "checkpoint", "json": True}


def convert(source, destination, **arguments):
    conversion.run({**ARGUMENTS, "source": str(source), "destination": str(destination), **arguments})
    return checkpoint.open_checkpoint(destination)


def restored(saved, *, tensor=1):
    definition = nn.define(saved.config.model, mesh=parallel.make_mesh(tensor=tensor))
    return definition, saved.params(definition)


def test_values_and_files_arrive(tmp_path, capsys):
    """bfloat16 stays bfloat16 on the disk; tokenizer, context and generation settings travel; any mesh reads it."""
    made = tiny.byte_level()
    file = gguf_files.write(tmp_path / "a.gguf", "llama-2", kind=Kind.BF16, tokenizer=made, vocab_size=320)
    source = pretrained.open(file)
    saved = convert(file, tmp_path / "out")
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["residual"], told["parameters"]) == ("checkpoint", "standard", 38_048)
    assert not checkpoint.verify(saved.path)
    assert saved.config.model == source.model
    again = pretrained.open(tmp_path / "out")
    assert (again.context, again.generation) == (source.context, source.generation)
    same(again, source)
    keys = np.stack([source.arrays["layers/attention/key", layer].read() for layer in range(2)])
    for tensor in (1, 4):
        _, params = restored(saved, tensor=tensor)
        assert (np.asarray(params["layers"]["attention"]["key"]) == keys.astype(np.float32)).all()
    assert saved.tokenizer().encode("the cat") == made.encode("the cat").ids
    with pytest.raises(UserError, match="was converted, not trained"):
        saved.optimizer({})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "out"]


@pytest.mark.parametrize(
    "arguments, kind, number, ladder",
    [
        (dict(ladder_layers="0"), "standard", 1, ()),
        pytest.param(dict(ladder_layers="2"), "ladder", 1, (2, 3), marks=pytest.mark.full),
        (dict(ladder_layers="0,2", residual="ladder-2"), "ladder", 2, (0, 2)),
    ],
)
def test_hybrids_equal_the_dense_reference(arguments, kind, number, ladder, small, tmp_path):
    """Zero layers change nothing: then transformers' own loss is the reference, too."""
    definition, params = restored(convert(small, tmp_path / "out", **arguments))
    ours = np.asarray(nn.compiled_logits(definition)(params, models.tokens()))
    shape = reference.Shape(layers=4, heads=4, kv_heads=4, vocab=129, kind=kind, number=number, ladder=ladder)
    expected = reference.evaluate(reference.logits, jax.tree.map(np.asarray, params), models.tokens(), shape)
    assert models.error(ours, expected) <= 1e-5


def test_to_hugging_face_and_back(small, tmp_path):
    conversion.run({**ARGUMENTS, "source": str(small), "destination": str(tmp_path / "hf"), "to": "huggingface"})
    saved = convert(tmp_path / "hf", tmp_path / "out", ladder_layers="1,2", residual="ladder-fresh", ranks=2)
    assert (saved.config.model.residual, saved.config.model.ranks) == ("ladder-fresh", 2)
    same(pretrained.open(tmp_path / "out"), pretrained.open(small))


def same(ours, theirs):
    """The arrays' values and dtypes, and the tokenizer's files."""
    assert ours.files == theirs.files
    dtypes = lambda source: {key: stored.dtype for key, stored in source.arrays.items()}
    assert dtypes(ours) == dtypes(theirs)
    models.same_arrays(ours, theirs)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(ladder_layers="5"), "not a number of layers"),
        (dict(ladder_layers="1,9"), "out of range"),
        (dict(ladder_layers="auto:2"), "name one by --calibration FILE"),
        (dict(ladder_layers="auto:5", calibration=["x"]), "from 1 to the model's 4 layers"),
        (dict(ladder_layers="auto:2", calibration=["nowhere.txt"]), "cannot read --calibration 'nowhere.txt'"),
        (dict(ladder_layers="2", search="ranked"), "--search is for --ladder-layers auto:N"),
        (dict(ladder_layers="2", residual="parallel"), "unknown ladder kind in --residual 'parallel'"),
        (dict(ladder_layers="2", residual="ladder-fresh"), "set --ranks N"),
        (dict(ladder_layers="2", residual="ladder-fresh", ranks=3), "not divisible"),
        (dict(ladder_layers="2", ranks=2), "model.ranks belongs to ladder-fresh"),
        (dict(residual="ladder"), "--residual needs --ladder-layers"),
        (dict(dtype="bfloat"), "did you mean 'bfloat16'?"),
        (dict(to="hugging"), "did you mean 'huggingface'?"),
        (dict(source="nowhere.gguf"), "there is no model at 'nowhere.gguf'"),
        (dict(destination="/proc/version/out"), "'/proc/version' is no folder, so"),
    ],
)
def test_mistakes_are_one_line(arguments, said, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refusal:
        convert(**{"source": small, "destination": "out", **arguments})
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not any(tmp_path.iterdir())


def test_what_is_there_stays(small, tmp_path, mistake):
    """A taken place, and one that another process is writing, by the command line's words."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    assert "is there already" in mistake("convert", small, tmp_path / "mine")
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    lock = os.open(folder / staging.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another process is writing" in mistake("convert", small, tmp_path / "out")
    os.close(lock)  # as when it is killed
    params = folder / "out" / "checkpoints" / "0" / "params"
    params.mkdir(parents=True)
    (params / "manifest.ocdbt").write_text("half")
    assert main(["convert", str(small), str(tmp_path / "out")]) == 0
    assert not checkpoint.verify(checkpoint.open_checkpoint(tmp_path / "out").path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_disk_that_refuses_or_forgets(small, tmp_path, monkeypatch):
    real, count = Stream.put, 0

    def full(self, *args, **settings):
        nonlocal count
        count += 1
        if count == 9:
            raise OSError(28, "No space left on device")
        real(self, *args, **settings)

    monkeypatch.setattr(Stream, "put", full)
    with pytest.raises(RunFailed, match="cannot write '.*out': No space left on device"):
        convert(small, tmp_path / "out")
    assert not any(tmp_path.iterdir())

    def forgetful(self, name, values, **settings):
        real(self, name, values, **settings)
        if (name, settings["layer"]) == ("layers/mlp/up", 2):
            self._stores[name][2, 5, 5].write(np.float32(7)).result()

    monkeypatch.setattr(Stream, "put", forgetful)
    with pytest.raises(RunFailed, match="layers/mlp/up of layer 2 reads back with other values than were written"):
        convert(small, tmp_path / "out")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(RunFailed, match="no space for '.*out': 0.2 MB needed, 0.0 free"):
        convert(small, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_sources_that_break_midway_leave_nothing(small, tmp_path):
    """Its file is cut off once it has been opened: as on a network's disk that goes away."""
    file = tmp_path / "file.gguf"
    file.write_bytes(small.read_bytes())
    source = pretrained.open(file)
    file.write_bytes(small.read_bytes()[:-1000])
    place = tmp_path / "out"
    with pytest.raises(UserError, match="it ends after"), staging.staged(place) as folder:
        formats.write(source, folder, format=formats.Format.CHECKPOINT, place=place)
    assert [path.name for path in tmp_path.iterdir()] == ["file.gguf"]


SLOW = """
import sys, time
from ladder_jax import cli
from ladder_jax.checkpoint.stream import Stream
put = Stream.put
Stream.put = lambda *a, **b: (time.sleep(0.2), put(*a, **b))
sys.exit(cli.main(["convert", sys.argv[1], "out"]))
"""


def test_sigterm_removes_what_there_is(small, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent.parent.parent)}
    command = [sys.executable, "-c", SLOW, str(small)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    while not list(tmp_path.glob(".out.converting/out/checkpoints")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said
    assert f"ladder-jax: SIGTERM: '{tmp_path / 'out'}' was not written" in said
    assert not any(tmp_path.iterdir())


def test_a_tokenizer_that_does_not_match(small, tmp_path):
    """More tokens than the model has: of a Hugging Face folder, where nothing but the number tells."""
    folder = models.write(tmp_path / "hf", "llama-2")
    (folder / "tokenizer.json").write_bytes(pretrained.open(small).files["tokenizer.json"])
    convert(folder, tmp_path / "fits")
    tiny.byte_level().save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=f"{folder}.*vocab_size=129 is too small"):
        convert(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"{folder}.* is not a tokenizer"):
        convert(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits", "hf"]
