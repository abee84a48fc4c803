"""Hugging Face models in: the same logits as transformers, every spelling read, every refusal
named.
"""

import functools
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import Biases, Dtype, Loop, Quantize, RopeScaling
from ladder_jax.decode import weights
from tests import cases
from tests.pretrained import models, record
from tests.pretrained.conftest import refused
from tests.test_start import same


@functools.cache
def recorded():
    return dict(np.load(record.FILE))


def logits(source, *, tensor=1, fsdp=1, **options):
    mesh = parallel.make_mesh(tensor=tensor, fsdp=fsdp)
    return np.asarray(
        nn.compiled_logits(nn.define(source.model, mesh=mesh))(
            pretrained.load(source, mesh=mesh, **options), models.tokens()
        )
    )


def check_logits(source, name):
    """On four ranks they are the recorded ones of that model."""
    assert cases.error(logits(source, tensor=4)[:, 2::3], recorded()[name]) <= 1e-4


@pytest.mark.parametrize("name", models.FAMILIES)
def test_logits_are_those_of_transformers(name, tmp_path):
    source = pretrained.open(models.write(tmp_path / "model", name))
    assert (source.model.dtype, source.model.residual) == (Dtype.FLOAT32, "standard")
    check_logits(source, name)


@pytest.fixture
def halved(tmp_path):
    """A model in bfloat16, and its tensors as they are stored."""
    folder = models.write(tmp_path / "model", "llama-3.1", values=ml_dtypes.bfloat16)
    return pretrained.open(folder), safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("mesh", [dict(tensor=4), dict(data=2, fsdp=2, tensor=2)], ids=str)
def test_loads_onto_every_mesh_with_the_values_that_are_stored(mesh, halved):
    """Padded vocabulary, heads split finer than there are, FSDP; bfloat16 stays so."""
    source, stored = halved
    mesh = parallel.make_mesh(**mesh)
    params = pretrained.load(source, mesh=mesh)
    query = np.asarray(params["layers"]["attention"]["query"][1])
    assert query.dtype == ml_dtypes.bfloat16
    assert np.array_equal(
        query, stored["model.layers.1.self_attn.q_proj.weight"].T.reshape(32, 4, 8)
    )
    table = params["embedding"]["table"]
    assert (
        table.sharding == nn.define(source.model, mesh=mesh).abstract["embedding"]["table"].sharding
    )
    assert table.shape[0] == nn.padded_vocabulary(129, ranks=mesh.shape["tensor"])
    assert np.array_equal(table[:129], stored["model.embed_tokens.weight"])
    assert not np.asarray(table)[129:].any()


def test_inference_reads_it_one_array_at_a_time(halved):
    """With the values that all of it in memory would give; norms' gains, which multiply in float32,
    in that.
    """
    source, _ = halved
    mesh = parallel.make_mesh(tensor=4)
    definition = nn.define(source.model, mesh=mesh)
    whole = pretrained.load(source, mesh=mesh, dtype=np.dtype(np.float32))
    form = dict(loop=Loop.UNROLLED, quantize=Quantize.INT8)
    read = weights.prepare(definition, pretrained.reader(source, definition), **form)
    same(read, weights.prepare(definition, whole, **form))
    up, table = pretrained.reader(source, definition)(
        [("layers/mlp/up", 1), ("embedding/table", None)]
    )
    assert up.dtype == ml_dtypes.bfloat16
    assert table.shape[0] == nn.padded_vocabulary(129, ranks=4)


def read(tmp_path, name="llama-3.1", **changes):
    """The ModelConfig of a folder whose config.json has these changes; the weights fit it."""
    return pretrained.open(models.write(tmp_path / "model", name, **changes)).model


def test_both_spellings_of_rope_say_the_same(tmp_path):
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16
    )
    old = {"rope_theta": 5e5, "rope_scaling": models.LLAMA3}
    older = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **models.LLAMA3, "rope_type": None},
    }
    new = {
        "rope_theta": ...,
        "rope_scaling": ...,
        "rope_parameters": {**models.LLAMA3, "rope_theta": 5e5},
    }
    between = {"rope_theta": 5e5, "rope_scaling": ..., "rope_parameters": models.LLAMA3}
    both = {
        "rope_theta": 5e5,
        "rope_scaling": models.LLAMA3,
        "rope_parameters": {"rope_type": "default"},
    }
    for number, spelling in enumerate([old, older, new, between, both]):
        model = read(tmp_path / str(number), **spelling)
        assert (model.rope_theta, model.rope_scaling) == (500_000.0, scaling), spelling


def test_absent_fields_mean_what_transformers_takes_them_for(tmp_path):
    model = read(
        tmp_path / "llama",
        "llama-2",
        num_key_value_heads=...,
        rope_theta=...,
        tie_word_embeddings=...,
    )
    assert (model.num_kv_heads, model.head_dim, model.rope_theta, model.tie_embeddings) == (
        4,
        8,
        10_000.0,
        False,
    )
    folder = models.write(tmp_path / "qwen3", "qwen3", head_dim=128)
    (folder / "config.json").write_text(json.dumps(models.config("qwen3", head_dim=...)))
    assert pretrained.open(folder).model.head_dim == 128


def test_dtypes_and_biases(tmp_path):
    assert read(tmp_path / "a", torch_dtype="float16").dtype is Dtype.BFLOAT16
    assert read(tmp_path / "b", torch_dtype="bfloat16").residual_dtype is Dtype.BFLOAT16
    assert read(tmp_path / "c", attention_bias=True).biases is Biases.ATTENTION
    assert read(tmp_path / "d", attention_bias=True, mlp_bias=True).biases is Biases.ALL
    assert read(tmp_path / "e", "qwen2").biases is Biases.QKV


REFUSED = {
    "mistral": {
        "sliding_window=4096": {"sliding_window": 4096},
        "sliding_window=4096 ": {"sliding_window": ...},  # what transformers takes it for
        "did you mean 'mistral'?": {"model_type": "mistrul"},
    },
    "qwen2": {
        "use_sliding_window=True": {"use_sliding_window": True},
    },
    "qwen3": {
        "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types=5 cannot": {"layer_types": 5},
        "rope_parameters differs": {
            "rope_parameters": {"full_attention": {"rope_type": "default"}}
        },
    },
    "llama-3.1": {
        "num_local_experts=8": {"num_local_experts": 8},
        "quantization_config": {"quantization_config": {"quant_method": "gptq"}},
        "hidden_act='gelu'": {"hidden_act": "gelu"},
        "rope_type='yarn'": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "low_freq_factor": {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
        "rope_scaling must be of type dict": {"rope_scaling": 8.0},
        "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    },
    "llama-2": {
        "mlp_bias": {"mlp_bias": True},
        "auto_map": {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
        "model_type": {"model_type": ...},
        "hidden_size": {"hidden_size": ...},
        "num_hidden_layers must be of type int": {"num_hidden_layers": "2"},
        "rms_norm_eps must be of type int | float": {"rms_norm_eps": True},
        "norm_eps must be positive": {"rms_norm_eps": 0.0},
        "head_dim must be even": {"head_dim": 7},
        "torch_dtype": {"torch_dtype": "float8_e4m3fn"},
    },
    "qwen3_moe": {
        "holds no model.layers.0.mlp.down_proj.weight": {"mlp_only_layers": [0]},
        "mlp_only_layers=[1] cannot be represented": {"mlp_only_layers": [1]},
        "mlp.gate.weight is (6, 32), but (4, 32)": {"num_experts": 4},
        "holds no model.layers.0.mlp.experts.6.": {"num_experts": 7},
        "is (32, 16), but (32, 17)": {"moe_intermediate_size": 17},
        "top_k=9 chooses more": {"num_experts_per_tok": 9},
        "k_norm.weight is (16,), but (32,)": {"model_type": "olmoe"},
        "a qwen3 has no experts": {"model_type": "qwen3"},
    },
    "qwen2_moe": {
        "must be the first ones, and not all 2": {"mlp_only_layers": [0, 1]},
        "decoder_sparse_step=0 cannot be": {"decoder_sparse_step": 0},
    },
    "olmoe": {
        "clip_qkv=8.0 cannot be": {"clip_qkv": 8.0},
    },
}


@pytest.mark.parametrize(
    "name, message", [(name, message) for name, rows in REFUSED.items() for message in rows]
)
def test_what_cannot_be_represented_is_refused_by_its_name(name, message, tmp_path):
    tensors = models.weights(models.config(name))
    folder = models.write(tmp_path / "model", name, tensors=tensors, **REFUSED[name][message])
    assert message.strip() in refused(folder)
