"""Convert a ModelConfig to `config.json`: for a class of transformers if there is one, else for modeling_ladder.py."""

import json
from typing import Any

import numpy as np

from ladder_jax import residual
from ladder_jax.config import Biases, ModelConfig, RouterSoftmax, layer_indices, parse_residual
from ladder_jax.errors import UserError
from ladder_jax.pretrained.huggingface.config_in import ROPE_FIELDS
from ladder_jax.pretrained.huggingface.families import FAMILIES, LADDER
from ladder_jax.pretrained.huggingface.read import TOKENS

MODELING = "modeling_ladder.py"
"""The program that is exported with models that transformers has no class for."""

_PLAIN = {  # (biases, qk_norm): model_type, and the fields that express them
    (Biases.NONE, False): ("llama", {"attention_bias": False, "mlp_bias": False}),
    (Biases.ATTENTION, False): ("llama", {"attention_bias": True, "mlp_bias": False}),
    (Biases.ALL, False): ("llama", {"attention_bias": True, "mlp_bias": True}),
    (Biases.QKV, False): ("qwen2", {"use_sliding_window": False}),
    (Biases.NONE, True): ("qwen3", {"attention_bias": False, "use_sliding_window": False}),
    (Biases.ATTENTION, True): ("qwen3", {"attention_bias": True, "use_sliding_window": False}),
}


def describe(model: ModelConfig, *, dtype: np.dtype, context: int, generation: dict[str, Any]) -> dict[str, Any]:
    """The contents of `config.json`. dtype: of the stored values. context: the longest sequence, in tokens.

    A standard model becomes a Llama, or with their biases or query and key norms a Qwen2 or Qwen3. For another model,
    the file names its topology, and modeling_ladder.py computes it. Raises UserError if the model's function depends on
    the number of ranks.
    """
    model_type, more = _kind(model) if model.moe is None else _kind_with_experts(model)
    rope, older = _rope(model), {}
    if model_type != LADDER:  # for transformers 4, and programs that read its field names
        older = {"rope_theta": model.rope_theta, "rope_scaling": rope if model.rope_scaling else None}
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        **more,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff if model.moe is None else model.moe.shared_width or model.moe.expert_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
        **older,
        "torch_dtype": str(dtype),
        "dtype": str(dtype),
        **{name: generation.get(name) for name in TOKENS},
    }


def needs_program(config: dict[str, Any]) -> bool:
    return config["model_type"] == LADDER


def _kind(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    name = parse_residual(model.residual)
    if name.depends_on_ranks or name.kind == "no-communication":
        raise UserError(
            f"a model with residual={model.residual!r} cannot be written for transformers: what it computes depends on"
            " the number of tensor-parallel ranks, of which PyTorch has one here"
        )
    plain = _PLAIN.get((model.biases, model.qk_norm))
    topology, standard = residual.of_model(model), residual.topology("standard", num_layers=model.num_layers)
    # Transformers' own classes require that the number of heads divides hidden_size, even if head_dim is set.
    if plain and topology == standard and model.d_model % model.num_heads == 0:
        return plain
    layers = None if model.ladder_layers is None else list(layer_indices(model.ladder_layers, model.num_layers))
    program = MODELING.removesuffix(".py")
    return LADDER, {
        "auto_map": {
            "AutoConfig": f"{program}.LadderConfig",
            "AutoModelForCausalLM": f"{program}.LadderForCausalLM",
        },
        "residual": "standard" if topology == standard else model.residual,
        "ladder_layers": None if topology == standard else layers,
        "biases": model.biases.value,
        "qk_norm": model.qk_norm,
    }


def _kind_with_experts(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Qwen3-MoE, Qwen2-MoE or Mixtral: modeling_ladder.py has no experts."""
    moe = model.moe
    shared = moe.shared_width > 0
    families = {
        "qwen3_moe": model.qk_norm and not shared and model.biases in (Biases.NONE, Biases.ATTENTION),
        "qwen2_moe": not model.qk_norm and shared and moe.shared_gate and model.biases in (Biases.NONE, Biases.QKV),
        "mixtral": not model.qk_norm
        and not shared
        and model.biases is Biases.NONE
        and moe.softmax is RouterSoftmax.CHOSEN,
    }
    name = next((name for name, fits in families.items() if fits and not moe.router_bias), None)
    if residual.of_model(model) != residual.topology("standard", num_layers=model.num_layers):
        raise UserError(f"a model with experts and residual={model.residual!r} cannot be written for transformers yet")
    if name is None or model.d_model % model.num_heads:
        raise UserError(
            "transformers has no class for this model with experts (allowed: what Qwen3-MoE, Qwen2-MoE and"
            " Mixtral can express)"
        )
    sizes = {"num_experts_per_tok": moe.top_k, "output_router_logits": False}
    if name == "mixtral":
        return name, {**sizes, "num_local_experts": moe.experts, "sliding_window": None}
    of_qwen2 = {"shared_expert_intermediate_size": moe.shared_width, "qkv_bias": model.biases is Biases.QKV}
    return name, {
        **sizes,
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.expert_width,
        "norm_topk_prob": moe.softmax is RouterSoftmax.CHOSEN,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        **(of_qwen2 if name == "qwen2_moe" else {"attention_bias": model.biases is Biases.ATTENTION}),
    }


def _rope(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for ours, theirs in ROPE_FIELDS.items()}}


def to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
