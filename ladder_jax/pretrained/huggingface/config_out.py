"""Convert a ModelConfig to `config.json`: for a class of transformers if there is one, else for modeling_ladder.py."""

import json
from typing import Any

import numpy as np

from ladder_jax import residual
from ladder_jax.config import Biases, ModelConfig, QKNorm, RouterSoftmax, layer_indices, parse_residual
from ladder_jax.errors import UserError
from ladder_jax.pretrained.huggingface.config_in import ROPE_FIELDS
from ladder_jax.pretrained.huggingface.families import FAMILIES, LADDER
from ladder_jax.pretrained.huggingface.read import TOKENS

MODELING = "modeling_ladder.py"
"""The program that is exported with models that transformers has no class for."""

_DENSE = {  # (biases, qk_norm): model_type, and the fields that express them
    (Biases.NONE, QKNorm.NONE): ("llama", {"attention_bias": False, "mlp_bias": False}),
    (Biases.ATTENTION, QKNorm.NONE): ("llama", {"attention_bias": True, "mlp_bias": False}),
    (Biases.ALL, QKNorm.NONE): ("llama", {"attention_bias": True, "mlp_bias": True}),
    (Biases.QKV, QKNorm.NONE): ("qwen2", {"use_sliding_window": False}),
    (Biases.NONE, QKNorm.HEAD): ("qwen3", {"attention_bias": False, "use_sliding_window": False}),
    (Biases.ATTENTION, QKNorm.HEAD): ("qwen3", {"attention_bias": True, "use_sliding_window": False}),
}
_EXPERTS = {  # likewise, and whether there is a shared expert
    (Biases.NONE, QKNorm.NONE, False): ("mixtral", {"sliding_window": None}),
    (Biases.NONE, QKNorm.HEAD, False): ("qwen3_moe", {"attention_bias": False, "use_sliding_window": False}),
    (Biases.ATTENTION, QKNorm.HEAD, False): ("qwen3_moe", {"attention_bias": True, "use_sliding_window": False}),
    (Biases.NONE, QKNorm.ALL, False): ("olmoe", {"attention_bias": False}),
    (Biases.ATTENTION, QKNorm.ALL, False): ("olmoe", {"attention_bias": True}),
    (Biases.NONE, QKNorm.NONE, True): ("qwen2_moe", {"qkv_bias": False, "use_sliding_window": False}),
    (Biases.QKV, QKNorm.NONE, True): ("qwen2_moe", {"qkv_bias": True, "use_sliding_window": False}),
}


def describe(model: ModelConfig, *, dtype: np.dtype, context: int, generation: dict[str, Any]) -> dict[str, Any]:
    """The contents of `config.json`. dtype: of the stored values. context: the longest sequence, in tokens.

    A standard model becomes a Llama, or with their biases or query and key norms a Qwen2 or Qwen3; with experts a
    Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE. For another model, the file names its topology, and modeling_ladder.py
    computes it. Raises UserError if the model's function depends on the number of ranks.
    """
    model_type, more = _kind(model)
    rope, older = _rope(model), {}
    if model_type != LADDER:  # for transformers 4, and programs that read its field names
        older = {"rope_theta": model.rope_theta, "rope_scaling": rope if model.rope_scaling else None}
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        **more,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": _width(model),
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


def _width(model: ModelConfig) -> int:
    """Of an MLP; where there is none, what transformers' own models have there."""
    if model.moe is None or model.moe.dense_layers:
        return model.d_ff
    return model.moe.shared_width or model.moe.expert_width


def needs_program(config: dict[str, Any]) -> bool:
    return config["model_type"] == LADDER


def model_type(model: ModelConfig) -> str:
    return _kind(model)[0]


def _kind(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model_type, and the fields that only it has."""
    name = parse_residual(model.residual)
    if name.depends_on_ranks or name.kind == "no-communication":
        raise UserError(
            f"a model with residual={model.residual!r} cannot be written for transformers: what it computes depends on"
            " the number of tensor-parallel ranks, of which PyTorch has one here"
        )
    if model.moe is not None and model.moe.router_bias:
        raise UserError("a model with model.moe.router_bias cannot be written for transformers")
    topology, standard = residual.of_model(model), residual.topology("standard", num_layers=model.num_layers)
    # Transformers' own classes require that the number of heads divides hidden_size, even if head_dim is set.
    if topology == standard and model.d_model % model.num_heads == 0 and (plain := _plain(model)):
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
        "qk_norm": model.qk_norm.value,
        **({} if model.moe is None else _experts(model) | {"shared_expert_gate": model.moe.shared_gate}),
    }


def _plain(model: ModelConfig) -> tuple[str, dict[str, Any]] | None:
    """Of a standard model as `_kind`, if transformers has a class for it."""
    moe = model.moe
    if moe is None:
        return _DENSE.get((model.biases, model.qk_norm))
    model_type, fields = _EXPERTS.get((model.biases, model.qk_norm, moe.shared_width > 0), (None, {}))
    if moe.dense_layers and model_type not in ("qwen2_moe", "qwen3_moe"):
        return None
    refused = {
        "mixtral": moe.softmax is not RouterSoftmax.CHOSEN,
        "olmoe": model.head_dim * model.num_heads != model.d_model,
        "qwen2_moe": not moe.shared_gate,
    }
    return None if model_type is None or refused.get(model_type) else (model_type, _experts(model, model_type) | fields)


def _experts(model: ModelConfig, model_type: str = LADDER) -> dict[str, Any]:
    """The fields of experts by the names of `model_type`; Ladder's are Qwen2-MoE's."""
    moe = model.moe
    sizes = {"num_experts_per_tok": moe.top_k, "output_router_logits": False}
    if model_type == "mixtral":
        return {**sizes, "num_local_experts": moe.experts}
    sizes |= {"num_experts": moe.experts, "norm_topk_prob": moe.softmax is RouterSoftmax.CHOSEN}
    if model_type == "olmoe":
        return sizes
    sizes |= {"moe_intermediate_size": moe.expert_width, "mlp_only_layers": list(range(moe.dense_layers))}
    if model_type != LADDER:
        sizes |= {"decoder_sparse_step": 1}
    return sizes if model_type == "qwen3_moe" else sizes | {"shared_expert_intermediate_size": moe.shared_width}


def _rope(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {"rope_type": "llama3", **{theirs: getattr(scaling, ours) for ours, theirs in ROPE_FIELDS.items()}}


def to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
