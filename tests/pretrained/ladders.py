"""Models of our own topologies, made of the tiny Llama's weights."""

from dataclasses import replace

from ladder_jax import pretrained
from ladder_jax.pretrained import source
from tests.pretrained import models

# name of the test: (Hugging Face model, model.residual, model.ladder_layers)
TOPOLOGIES = {
    "ladder": ("llama-3.1", "ladder", None),
    "hybrid-last": ("llama-3.2", "ladder", "2"),
    "hybrid-list": ("qwen3", "ladder", "0,2"),
    "hybrid-delay-2": ("qwen2", "ladder-2", "1,2,3"),
    "ladder-3": ("llama-all-biases", "ladder-3", None),
    "parallel": ("llama-2", "parallel", None),
    "parallel-shared-norm": ("llama-2", "parallel-shared-norm", None),
    "hybrid-parallel-ladder": ("llama-attention-bias", "parallel-ladder", "1,3"),
    "experts-ladder": ("qwen3_moe", "ladder", None),
    "experts-farskip": ("qwen2_moe", "farskip", None),
    "experts-hybrid-farskip": ("qwen2_moe", "farskip", "1,2"),
    "experts-hybrid-delay-2": ("olmoe", "ladder-2", "2"),
    "experts-parallel": ("mixtral", "parallel", None),
    "experts-dense-ladder": ("qwen3_moe with a dense layer", "ladder", None),
    "experts-dense-farskip": ("qwen2_moe with a dense layer", "farskip", None),
    "experts-dense-hybrid": ("qwen2_moe with a dense layer", "farskip", "3"),
    "experts-ungated": ("qwen2_moe", "farskip", None),
}
LAYERS = 4


def make(folder, name, **more):
    """Four layers: enough for delays to reach over several."""
    family, residual, ladder_layers = TOPOLOGIES[name]
    types = {"layer_types": ["full_attention"] * LAYERS} if family == "qwen3" else {}
    standard = pretrained.open(
        models.write(folder, family, num_hidden_layers=LAYERS, **types, **more)
    )
    model = replace(standard.model, residual=residual, ladder_layers=ladder_layers)
    if name == "experts-ungated":
        model = replace(model, moe=replace(model.moe, shared_gate=False))
    wanted = source.expected_shapes(model)
    arrays = {key: stored for key, stored in standard.arrays.items() if key in wanted}
    return replace(standard, model=model, arrays=arrays)
