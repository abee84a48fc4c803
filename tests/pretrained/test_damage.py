"""Files that are not whole, or not what their description says: one line that names what is
wrong.
"""

import json
import os
import pathlib
from unittest import mock

import numpy as np
import pytest

from ladder_jax import pretrained
from ladder_jax.errors import UserError
from ladder_jax.pretrained.formats import open_model
from ladder_jax.pretrained.huggingface import weights
from ladder_jax.pretrained.huggingface.folder import tokenizer_files
from tests.pretrained import models
from tests.pretrained.conftest import refused

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """In three files and an index."""
    made = pretrained.open(models.write(tmp_path / "made", "llama-3.1"))
    monkeypatch.setattr("ladder_jax.pretrained.huggingface.folder.SHARD_BYTES", 30_000)
    pretrained.write_huggingface(made, tmp_path / "whole")
    pretrained.open(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_truncated_or_removed(kept, whole):
    file = sorted(whole.glob("*.safetensors"))[1]
    content = file.read_bytes()
    wrong = [content[:kept]]
    for header in (b"\xff" * 8, (2**62).to_bytes(8, "little"), (4).to_bytes(8, "little") + b"nope"):
        wrong.append(header + content[len(header) :])
    for damaged in wrong:
        file.write_bytes(damaged)
        assert f"{file.name}' is not a whole safetensors file" in refused(whole)
    os.remove(file)
    assert file.name in refused(whole)


def test_an_empty_tensor_claims_many_experts(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    entry = {"dtype": "F32", "shape": [2**40, 0, 4], "data_offsets": [0, 0]}
    header = json.dumps({name: entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert list(weights.tensors_in(file)) == [name]


def test_index_and_shards_disagree(whole):
    file = whole / "model.safetensors.index.json"
    shards = json.loads(file.read_text())["weight_map"]
    first = {name: shard for name, shard in shards.items() if shard == shards[QUERY]}
    for content, said in (
        ({"weight_map": first}, "holds no model."),
        ({"weight_map": {**shards, QUERY: "../made/model.safetensors"}}, "outside its folder"),
        ({"metadata": {}}, "weight_map"),
    ):
        file.write_text(json.dumps(content))
        assert said in refused(whole)
    (whole / "stale.safetensors").write_bytes((whole / shards[QUERY]).read_bytes())
    file.write_text(json.dumps({"weight_map": {**shards, QUERY: "stale.safetensors"}}))
    assert "twice: 'stale.safetensors' has it, too" in refused(whole)
    file.write_text("[" * 100_000)
    assert "not JSON" in refused(whole)
    # saved again as one file, by transformers, which leaves the index there
    os.rename(whole.parent / "made/model.safetensors", whole / "model.safetensors")
    pretrained.open(whole)


@pytest.mark.parametrize(
    "more, said",
    [
        ({QUERY: np.zeros((32, 31), np.float32)}, f"{QUERY} is (32, 31), but (32, 32)"),
        ({"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((1, 1), np.float32)}, "experts"),
        ({QUERY: np.zeros((32, 32), np.int8)}, "I8"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(more, said, tmp_path):
    assert said in refused(models.write(tmp_path / "model", "llama-3.1", more=more))


def test_fewer_layers_than_the_configuration_has(tmp_path):
    changes = dict(tensors=models.weights(models.config("llama-2")), num_hidden_layers=3)
    assert "model.layers.2." in refused(models.write(tmp_path / "model", "llama-2", **changes))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_nested_json(name, tmp_path):
    folder = models.write(tmp_path / "model", "llama-2")
    (folder / name).write_text("[" * 100_000)
    assert "is not JSON" in refused(folder)


def test_a_tied_head_may_stand_twice(tmp_path):
    table = models.weights(models.config("llama-3.2"))["model.embed_tokens.weight"]
    twice = models.write(tmp_path / "twice", "llama-3.2", more={"lm_head.weight": table})
    assert "head/table" not in {key.name for key in pretrained.open(twice).arrays}
    models.write(tmp_path / "untied", "llama-3.2", more={"lm_head.weight": -table})
    assert "differs from model.embed_tokens.weight" in refused(tmp_path / "untied")


def test_old_files_hold_rotary_frequencies_too(tmp_path):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    pretrained.open(models.write(tmp_path / "model", "llama-2", more=frequencies))


def test_pickles_are_refused_with_a_hint(tmp_path):
    folder = models.write(tmp_path / "model", "llama-2")
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    message = refused(folder)
    assert "pickles" in message
    assert "safetensors" in message


def test_what_is_no_model(tmp_path):
    assert "there is no model" in refused(tmp_path / "nowhere")
    assert "no ladder_jax checkpoint" in refused(tmp_path)
    (tmp_path / "file").write_text("text")
    assert "no pretrained model" in refused(tmp_path / "file")
    folder = models.write(tmp_path / "empty", "llama-2")
    os.remove(folder / "model.safetensors")
    assert "no model.safetensors" in refused(folder)
    for content in ("[]", "{", '"text"'):
        (folder / "config.json").write_text(content)
        assert "config.json" in refused(folder)


def test_a_file_that_is_cut_short_or_removed_while_it_is_read(tmp_path):
    """An error, where a memory map would end the process (SIGBUS)."""
    source = pretrained.open(models.write(tmp_path / "model", "llama-2"))
    file = tmp_path / "model/model.safetensors"
    os.truncate(file, 4000)
    for stored in source.arrays.values():
        with pytest.raises(UserError, match=f"{file.name}' was cut short: it was complete when"):
            stored.read()
    os.remove(file)
    with pytest.raises(UserError, match=f"cannot read .*{file.name}': No such file"):
        stored.read()


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="of Linux")
def test_a_disk_that_fails(tmp_path):
    """The file and the reason; neither "there is no file" nor "cut short"."""
    folder = models.write(tmp_path / "model", "llama-2")
    opened = open_model(folder)
    array = next(iter(opened.weights.arrays.values()))
    file = folder / "model.safetensors"
    file.unlink()
    file.symlink_to("/proc/self/mem")  # whose first bytes give EIO
    said = f"cannot read '{file}': Input/output error"
    for reads in (pretrained.open, lambda _: array.read(), lambda _: opened.identity):
        assert refused(folder, by=reads) == said
    (folder / "tokenizer.json").touch()
    fails = mock.patch.object(pathlib.Path, "read_bytes", side_effect=OSError(116, "Stale"))
    with fails, pytest.raises(UserError, match="cannot read '.*tokenizer.json': Stale"):
        tokenizer_files(folder)
