"""Hugging Face models out: bit for bit what came in, the same logits for our topologies, whole or
not at all.
"""

import json
import os
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ladder_jax import nn, parallel, pretrained
from tests import cases, starts
from tests.covering import full
from tests.pretrained import ladders, models
from tests.pretrained.test_in import check_logits
from tests.refusals import refused


def bits(folder):
    """Dtype, shape and bytes of every tensor, by the safetensors library."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    return {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()}


DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16]
EVERY_DTYPE = [
    (name, dtype) if (number - place) % 3 == 0 else full(name, dtype)
    for number, name in enumerate([*models.CONFIGS, *models.EXPERTS])
    for place, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize("name, dtype", EVERY_DTYPE, ids=str)
def test_standard_models_come_back_bit_for_bit(name, dtype, tmp_path, monkeypatch):
    told = {"torch_dtype": ..., "dtype": np.dtype(dtype).name}
    folder = models.write(tmp_path / "in", name, values=dtype, **told)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 128}}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    source = pretrained.open(folder)
    monkeypatch.setattr("ladder_jax.pretrained.huggingface.folder.SHARD_BYTES", 20_000)
    out = tmp_path / "out"
    pretrained.write_huggingface(source, out)
    assert len(list(out.glob("model-0000?-of-*.safetensors"))) > 1
    assert bits(out) == bits(folder)
    again = pretrained.open(out)
    assert (again.model, again.context) == (source.model, 256)
    assert again.generation == source.generation == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert again.files == source.files
    assert set(source.files) == {"tokenizer.json", "chat_template.jinja"}
    config = json.loads((out / "config.json").read_text())
    family = models.config(name)["model_type"]
    assert config["model_type"] == ("llama" if family == "mistral" else family)
    assert config["dtype"] == np.dtype(dtype).name
    assert "auto_map" not in config
    assert not (out / "modeling_ladder.py").exists()


@pytest.mark.parametrize("name", ladders.TOPOLOGIES)
def test_topologies_are_named_and_come_back(name, tmp_path):
    made = ladders.make(tmp_path / "made", name)
    pretrained.write_huggingface(made, tmp_path / "out")
    again = pretrained.open(tmp_path / "out")
    # Layers are written as a list, whatever they were chosen by.
    same = lambda model: nn.define(model, mesh=parallel.make_mesh()).topology
    assert same(again.model) == same(made.model)
    assert replace(again.model, ladder_layers=None) == replace(made.model, ladder_layers=None)
    assert (tmp_path / "out/modeling_ladder.py").is_file()
    models.same_arrays(again, made)


@pytest.mark.parametrize(
    "name",
    [
        "hybrid-parallel-ladder",
        "experts-dense-hybrid",
        full("hybrid-delay-2"),
    ],
)
def test_the_pytorch_program_computes_what_we_do(name, tmp_path):
    """Recorded; `make test-hf` has it live, and every topology."""
    check_logits(ladders.make(tmp_path / "made", name), name)


def test_a_checkpoint_is_exported_without_its_padding(tmp_path):
    definition = cases.define("ladder", num_layers=2, tensor=4)
    starts.save(tmp_path / "run/checkpoints", definition)
    params = cases.placed(definition)
    assert params["embedding"]["table"].shape[0] == 512
    pretrained.write_huggingface(pretrained.open(tmp_path / "run"), tmp_path / "out")
    again = pretrained.open(tmp_path / "out")
    loaded = pretrained.load(again, mesh=definition.layout.mesh)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert bits(tmp_path / "out")["lm_head.weight"][1] == (251, 32)
    assert (again.context, again.model.residual) == (64, "ladder")


@pytest.mark.parametrize("residual", ["ladder-fresh", "desync-2", "no-communication"])
def test_functions_of_the_ranks_are_refused(residual, tmp_path):
    source = pretrained.open(models.write(tmp_path / "model", "llama-2"))
    source = replace(source, model=replace(source.model, residual=residual))
    with refused(residual):
        pretrained.write_huggingface(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]
