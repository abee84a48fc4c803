"""Models of our own topologies, made of the tiny Llama's weights."""

import dataclasses
import pathlib

from ladder_jax import pretrained
from ladder_jax.pretrained import source
from tests.pretrained import models

# name of the test: (Hugging Face model, changes of its ModelConfig)
TOPOLOGIES = {
    "ladder": ("llama-3.1", dict(residual="ladder")),
    "hybrid-last": ("llama-3.2", dict(residual="ladder", ladder_layers="2")),
    "hybrid-list": ("qwen3", dict(residual="ladder", ladder_layers="0,2")),
    "hybrid-delay-2": ("qwen2", dict(residual="ladder-2", ladder_layers="1,2,3")),
    "ladder-3": ("llama-all-biases", dict(residual="ladder-3")),
    "parallel": ("llama-2", dict(residual="parallel")),
    "parallel-shared-norm": ("llama-2", dict(residual="parallel-shared-norm")),
    "hybrid-parallel-ladder": (
        "llama-attention-bias",
        dict(residual="parallel-ladder", ladder_layers="1,3"),
    ),
    "experts-ladder": ("qwen3_moe", dict(residual="ladder")),
    "experts-farskip": ("qwen2_moe", dict(residual="farskip")),
    "experts-hybrid-farskip": ("qwen2_moe", dict(residual="farskip", ladder_layers="1,2")),
    "experts-hybrid-delay-2": ("olmoe", dict(residual="ladder-2", ladder_layers="2")),
    "experts-parallel": ("mixtral", dict(residual="parallel")),
    "experts-dense-ladder": ("qwen3_moe with a dense layer", dict(residual="ladder")),
    "experts-dense-farskip": ("qwen2_moe with a dense layer", dict(residual="farskip")),
    "experts-dense-hybrid": (
        "qwen2_moe with a dense layer",
        dict(residual="farskip", ladder_layers="3"),
    ),
    "experts-ungated": ("qwen2_moe", dict(residual="farskip", moe=dict(shared_gate=False))),
}
LAYERS = 4


def make(folder: pathlib.Path, name: str, **more) -> source.Source:
    """Four layers: enough for delays to reach over several."""
    family, changes = TOPOLOGIES[name]
    types = {"layer_types": ["full_attention"] * LAYERS} if family == "qwen3" else {}
    standard = pretrained.open(
        models.write(folder, family, num_hidden_layers=LAYERS, **types, **more)
    )
    moe = standard.model.moe and dataclasses.replace(standard.model.moe, **changes.get("moe", {}))
    model = dataclasses.replace(standard.model, **{**changes, "moe": moe})
    wanted = source.expected_shapes(model)
    arrays = {key: stored for key, stored in standard.arrays.items() if key in wanted}
    return dataclasses.replace(standard, model=model, arrays=arrays)
