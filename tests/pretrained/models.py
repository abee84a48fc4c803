"""Tiny Hugging Face models of every family, their weights from NumPy: the same bytes wherever they
are made.

Names and shapes are written out here once more, as transformers has them, and share nothing with
the package.
"""

import json

import numpy as np
import safetensors.numpy

_SHAPE = {
    "vocab_size": 129,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_OLD = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
    "transformers_version": "4.57.0",
}
_NEW = {"dtype": "float32", "transformers_version": "5.2.0"}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

CONFIGS = {
    # Llama 2: as many key/value heads as query heads, which old files do not count.
    "llama-2": {"model_type": "llama", **_OLD, "num_key_value_heads": None, "pretraining_tp": 1},
    # Llama 3.1: transformers 4's spelling. "type" for "rope_type" is older still.
    "llama-3.1": {"model_type": "llama", **_OLD, "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    # Llama 3.2: tied, transformers 5's spelling.
    "llama-3.2": {
        "model_type": "llama",
        **_NEW,
        "rope_parameters": {**LLAMA3, "rope_theta": 500_000.0, "factor": 32.0},
        "tie_word_embeddings": True,
        "head_dim": 8,
    },
    # Mistral Nemo: heads of another size than hidden_size / num_attention_heads.
    "mistral": {"model_type": "mistral", **_OLD, "sliding_window": None, "head_dim": 16},
    "qwen2": {
        "model_type": "qwen2",
        **_OLD,
        "use_sliding_window": False,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "qwen3": {
        "model_type": "qwen3",
        **_NEW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "head_dim": 16,
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    # SmolLM2: three query heads a key/value head, tied, fields that transformers ignores.
    "smollm2": {
        "model_type": "llama",
        **_OLD,
        "hidden_size": 48,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": None,
        "tie_word_embeddings": True,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "llama-attention-bias": {"model_type": "llama", **_OLD, "attention_bias": True},
    "llama-all-biases": {"model_type": "llama", **_OLD, "attention_bias": True, "mlp_bias": True},
}
FAMILIES = [name for name in CONFIGS if "bias" not in name]
"""The others differ from one of these by their biases only; `make test-hf` has them."""

_ROUTED = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
}
# the first layer without experts
_FIRST = {"mlp_only_layers": [0], "num_hidden_layers": 3, "intermediate_size": 40}
_QWEN2 = {**_OLD, **_ROUTED, "shared_expert_intermediate_size": 40, "norm_topk_prob": False}
_QWEN3 = {
    **_OLD,
    **_ROUTED,
    "norm_topk_prob": True,
    "head_dim": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WITH_EXPERTS = {
    "qwen3_moe": {**_QWEN3, "use_sliding_window": False, "sliding_window": None},
    "qwen2_moe": {
        **_QWEN2,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 21,
    },
    "mixtral": {
        **_OLD,
        **_ROUTED,
        "num_experts": ...,
        "moe_intermediate_size": ...,
        "num_local_experts": 6,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    },
    "olmoe": {
        **_OLD,
        **_ROUTED,
        "moe_intermediate_size": ...,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "attention_bias": False,
    },
    "qwen3_moe with a dense layer": {**_QWEN3, **_FIRST},
    "qwen2_moe with a dense layer": {**_QWEN2, **_FIRST},
    "qwen3_moe of transformers 5": {
        **_NEW,
        **_PLAIN,
        **_ROUTED,
        "num_experts": ...,
        "num_local_experts": 6,
        "head_dim": 16,
    },
}
EXPERTS = [
    name
    for name in WITH_EXPERTS
    if name not in ("qwen2_moe with a dense layer", "qwen3_moe of transformers 5")
]
"""Those whose logits are recorded."""

_SORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose tensors are drawn in the order of their names."""


def config(name, **changes):
    """The contents of a `config.json`; a change to `...` leaves the field out."""
    told = {"model_type": name.partition(" ")[0], **_SHAPE, **(CONFIGS | WITH_EXPERTS)[name]}
    return {field: value for field, value in (told | changes).items() if value is not ...}


def shapes(told):
    """What transformers has in a model of this configuration, [out, in]; of experts, as the Hub's
    checkpoints.
    """
    family = told["model_type"]
    width = told["hidden_size"]
    heads = told["num_attention_heads"]
    size = told.get("head_dim") or width // heads
    queries = heads * size
    keys = (told.get("num_key_value_heads") or heads) * size
    experts = told.get("num_experts") or told.get("num_local_experts") or 0
    inner = told["intermediate_size"]
    block = "mlp"
    gate = "gate_proj"
    up = "up_proj"
    down = "down_proj"
    if family == "mixtral":
        block = "block_sparse_moe"
        gate = "w1"
        up = "w3"
        down = "w2"
    found = {
        "model.embed_tokens.weight": (told["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not told.get("tie_word_embeddings"):
        found["lm_head.weight"] = (told["vocab_size"], width)
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}

    def mlp(name, inner):
        return {
            f"{name}.{gate}.weight": (inner, width),
            f"{name}.{up}.weight": (inner, width),
            f"{name}.{down}.weight": (width, inner),
        }

    for layer in range(told["num_hidden_layers"]):
        one = {f"self_attn.{name}.weight": (out, width) for name, out in outputs.items()}
        one["self_attn.o_proj.weight"] = (width, queries)
        one |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
        if family in ("qwen2", "qwen2_moe") or told.get("attention_bias"):
            one |= {f"self_attn.{name}.bias": (out,) for name, out in outputs.items()}
        if told.get("attention_bias"):
            one["self_attn.o_proj.bias"] = (width,)
        if told.get("mlp_bias"):
            one |= {
                "mlp.gate_proj.bias": (inner,),
                "mlp.up_proj.bias": (inner,),
                "mlp.down_proj.bias": (width,),
            }
        dense = not experts or layer in told.get("mlp_only_layers", ())
        if dense:
            one |= mlp("mlp", inner)
        elif family == "qwen2_moe":
            one |= mlp("mlp.shared_expert", told["shared_expert_intermediate_size"])
            one["mlp.shared_expert_gate.weight"] = (1, width)
        if family in ("qwen3", "qwen3_moe"):
            one |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        if family == "olmoe":  # of all heads together
            one |= {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
        if not dense:
            one[f"{block}.gate.weight"] = (experts, width)
            for expert in range(experts):
                one |= mlp(f"{block}.experts.{expert}", told.get("moe_intermediate_size", inner))
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in one.items()}
    return found


def weights(told, *, seed=0, dtype=np.float32):
    """Random values large enough that every sublayer moves the logits."""
    rng = np.random.default_rng(seed)
    named = shapes(told).items()
    if told["model_type"] in _SORTED:
        named = sorted(named)
    return {name: drawn(rng, name, shape).astype(dtype) for name, shape in named}


def drawn(rng, name, shape):
    """A tensor of that name: gains of norms are around 1; a matrix [out, in] keeps the size of what
    it multiplies.
    """
    values = rng.standard_normal(shape)
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith(".bias"):
        return 0.3 * values
    return 1.3 * values / np.sqrt(shape[-1])


def write(
    folder,
    name,
    *,
    values=np.float32,
    tensors=None,
    more=None,
    **changes,
):
    """The model called `name`, one file of dtype `values`, or of `tensors`; `more` adds some, or
    replaces them.
    """
    told = config(name, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": [2, 5]})
    )
    tensors = weights(told, dtype=values) if tensors is None else tensors
    safetensors.numpy.save_file({**tensors, **(more or {})}, folder / "model.safetensors")
    return folder


def tokens():
    """[2, 24], longer than Llama 3's original context here, so that its stretched positions
    count.
    """
    return np.random.default_rng(7).integers(3, 129, (2, 24)).astype(np.int32)


def same_arrays(ours, theirs):
    """Of two Sources: the values of each array, to the last bit."""
    assert ours.arrays.keys() == theirs.arrays.keys()
    for key, stored in theirs.arrays.items():
        assert np.array_equal(ours.arrays[key].read(), stored.read()), key
