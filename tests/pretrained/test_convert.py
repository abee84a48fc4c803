"""`ladder-jax convert`: what it writes is what it read, with the layers that were asked for, whole
or not at all.
"""

import dataclasses
import fcntl
import json
import os
import types

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ladder_jax import checkpoint, nn, parallel, pretrained
from ladder_jax.checkpoint import arrays
from ladder_jax.errors import RunFailed
from ladder_jax.pretrained import convert as conversion, staging
from ladder_jax.pretrained.convert import Text
from tests import tokenizers as tiny
from tests.pretrained import gguf_files, models
from tests.refusals import refused

OPTIONS = (
    "ladder_layers residual ranks dtype calibration calibration_tokens refit ridge search tensor"
)
ARGUMENTS = dict.fromkeys(OPTIONS.split()) | {"to": "checkpoint", "json": True}
LETTERS = types.SimpleNamespace(encode=lambda text: list(map(ord, text)))


def convert(source, destination, **arguments):
    conversion.run(
        {**ARGUMENTS, "source": str(source), "destination": str(destination), **arguments}
    )
    return checkpoint.open_checkpoint(destination)


def restored(saved, *, tensor):
    return saved.params(nn.define(saved.config.model, mesh=parallel.make_mesh(tensor=tensor)))


def test_values_and_files_arrive(tmp_path, capsys):
    """bfloat16 stays bfloat16 on the disk; tokenizer, context and generation settings travel; any
    mesh reads it.
    """
    made = tiny.byte_level()
    file = gguf_files.write(
        tmp_path / "a.gguf",
        "llama-2",
        kind=Kind.BF16,
        tokenizer=made,
        vocab_size=320,
        max_position_embeddings=2**20,
    )
    source = pretrained.open(file)
    saved = convert(file, tmp_path / "out")
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["residual"], told["parameters"]) == (
        "checkpoint",
        "standard",
        38_048,
    )
    assert not checkpoint.verify(saved.path)
    again = pretrained.open(tmp_path / "out")
    about = lambda source: (source.model, source.context, source.generation)
    assert about(again) == about(source)
    same(again, source)
    keys = restored(saved, tensor=4)["layers"]["attention"]["key"]
    for layer in range(2):
        stored = source.arrays["layers/attention/key", layer].read()
        assert np.array_equal(keys[layer], stored.astype(np.float32))
    assert saved.tokenizer().encode("the cat") == made.encode("the cat").ids
    with refused("was converted, not trained"):
        saved.optimizer({})
    assert sorted(os.listdir(tmp_path)) == ["a.gguf", "out"]


def test_to_hugging_face_and_back(small, tmp_path, prints):
    (tmp_path / "hf").mkdir()  # an empty folder may be there
    prints("convert", small, tmp_path / "hf", "--to", "huggingface")
    how = dict(ladder_layers="1,2", residual="ladder-fresh", ranks=2)
    model = convert(tmp_path / "hf", tmp_path / "out", **how).config.model
    assert {name: getattr(model, name) for name in how} == how
    same(pretrained.open(tmp_path / "out"), pretrained.open(small))


def same(ours, theirs):
    """The arrays' values and dtypes, and the tokenizer's files."""
    assert ours.files == theirs.files
    dtypes = lambda source: {key: stored.dtype for key, stored in source.arrays.items()}
    assert dtypes(ours) == dtypes(theirs)
    models.same_arrays(ours, theirs)


TEXT = "--ladder-layers 2 --calibration text"
MISTAKES = {
    "small out --ladder-layers 5": "is no choice of layers",
    "small out --ladder-layers 1,9": "is no choice of layers",
    "small out --ladder-layers auto:2": "name one by --calibration FILE",
    "small out --ladder-layers auto:5 --calibration text": "from 1 to the model's 4 layers",
    "small out --ladder-layers 2 --search ranked": "--search needs --ladder-layers auto:N",
    "small out --ladder-layers 2 --residual parallel": "unknown ladder kind in residual 'parallel'",
    "small out --ladder-layers 2 --residual ladder-fresh": "set ranks, too",
    "small out --ladder-layers 2 --residual ladder-fresh --ranks 3": "not divisible",
    "small out --ladder-layers 2 --ranks 2": "model.ranks belongs to ladder-fresh",
    "small out --residual ladder": "residual needs ladder_layers",
    "small out --dtype bfloat": "did you mean 'bfloat16'?",
    "small out --to hugging": "did you mean 'huggingface'?",
    "small out --ladder-layers 2 --residual ladder-fresh --ranks 2 --to huggingface --calibration .": "transformers",
    "nowhere.gguf out": "there is no model at 'nowhere.gguf'",
    "small /proc/version/out": "'/proc/version' is no folder, so",
    "small out --calibration text": "--calibration needs --ladder-layers",
    "small out --ladder-layers 2 --refit inputs": "--refit needs a text: name one by --calibration FILE",
    "small out --ladder-layers 2 --ridge 1": "--ridge needs --refit inputs or both, and a text",
    f"small out {TEXT} --refit none": "--calibration is for --refit inputs",
    f"small out {TEXT} --refit input": "did you mean 'inputs'?",
    f"small out {TEXT} --ridge 0": "must be a positive number, not 0",
    f"small out {TEXT}:0": "the weight must be positive, not 0",
    f"small out {TEXT} --calibration-tokens 31": "model's width, 32; there",
    f"small out {TEXT} --calibration short": "tokens; measuring needs at least",
    f"small out {TEXT} --calibration .": "cannot read '.'",
    f"small out {TEXT} --calibration latin": "latin: not UTF-8 text",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes(words, small, tmp_path, mistake):
    (tmp_path / "text").write_text("the thin cat sat there then, with that other thing; " * 40)
    (tmp_path / "short").write_text("the cat")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    assert MISTAKES[words] in mistake("convert", *words.replace("small", str(small)).split())


def test_what_is_there_stays(small, tmp_path, mistake, prints):
    """A taken place, and one that another process is writing, by the command line's words."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("mine")
    assert "is there already" in mistake("convert", small, tmp_path / "mine")
    assert "cannot hold checkpoints" in mistake("convert", small, tmp_path / "a.__lock")
    folder = tmp_path / ".out.converting"
    folder.mkdir()
    lock = os.open(folder / staging.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another process is writing" in mistake("convert", small, tmp_path / "out")
    os.close(lock)  # as when it is killed
    params = folder / "out/checkpoints" / "0/params"
    params.mkdir(parents=True)
    (params / "manifest.ocdbt").write_text("half")
    prints("convert", small, tmp_path / "out")
    assert not checkpoint.verify(checkpoint.open_checkpoint(tmp_path / "out").path)
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]


def test_a_disk_that_refuses(small, tmp_path, monkeypatch):
    real = arrays._part_of
    count = 0
    out = tmp_path / "out"

    def full(*about):
        nonlocal count
        count += 1
        if count == 9:
            raise OSError(28, "No space left on device")
        return real(*about)

    monkeypatch.setattr(arrays, "_part_of", full)
    with pytest.raises(RunFailed, match="cannot write '.*out': No space left on device"):
        convert(small, out)
    assert not any(tmp_path.iterdir())

    monkeypatch.setattr(arrays, "_part_of", real)
    monkeypatch.setattr(
        staging.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(RunFailed, match="no space for '.*out': 0.2 MB needed, 0.0 free"):
        convert(small, out)
    assert not any(tmp_path.iterdir())


def test_a_tokenizer_that_does_not_match(small, tmp_path):
    """More tokens than the model has: of a Hugging Face folder, where nothing but the number
    tells.
    """
    folder = models.write(tmp_path / "hf", "llama-2")
    (folder / "tokenizer.json").write_bytes(pretrained.open(small).files["tokenizer.json"])
    convert(folder, tmp_path / "fits")
    tiny.byte_level().save(str(folder / "tokenizer.json"))
    with refused(f"{folder}.*vocab_size=129 is too small"):
        convert(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text("{}")
    with refused(f"{folder}.* is not a tokenizer"):
        convert(folder, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["fits", "hf"]


@pytest.mark.parametrize("content, tokens, skip, shape", [
    ("a" * 129, 128, 0, (1, 129)),
    ("ab" * 3000, 5000, 0, (4, 1025)),
    ("ab" * 3000, 2048, 3000, (2, 1025)),
])  # fmt: skip
def test_rows_of_a_text(content, tokens, skip, shape, tmp_path):
    """No longer than 1,024 tokens; they share one token. Letters are tokens."""
    (tmp_path / "text").write_text(content)
    rows = conversion.rows_of(
        [Text(str(tmp_path / "text"))], tokenizer=LETTERS, tokens=tokens, skip=skip
    )
    assert rows.shape == shape
    assert (rows[1:, 0] == rows[:-1, -1]).all()


def test_shares_of_several_texts(tmp_path):
    for name, letter in (("a.txt", "a"), ("b:2.txt", "b")):
        (tmp_path / name).write_text(letter * 5000)
    assert [conversion.parse_text(f"x{end}") for end in ("", ":2", ":y")] == [
        Text("x"),
        Text("x", 2.0),
        Text("x:y"),
    ]
    texts = [Text(str(tmp_path / "a.txt"), 3), Text(str(tmp_path / "b:2.txt"))]
    tenths = [dataclasses.replace(text, weight=text.weight / 10) for text in texts]
    for of, tokens, length in ((texts, 4000, 1000), (texts, 2046, 511), (tenths, 4000, 1000)):
        rows = conversion.rows_of(of, tokenizer=LETTERS, tokens=tokens, skip=800)
        assert rows.shape == (4, length + 1)
        assert [chr(row[0]) for row in rows] == ["a", "a", "a", "b"]
