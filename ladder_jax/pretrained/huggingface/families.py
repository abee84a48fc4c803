"""The families of Hugging Face models that we can represent, and the fields of `config.json` that we cannot."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from ladder_jax.config import QKNorm
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Family:
    """architecture: transformers' class. defaults: transformers' values of fields that are missing in the file.

    qk_norm: over which elements queries and keys are normalised. qkv_bias: whether the QKV projections have a bias,
    unless the file's qkv_bias says otherwise. experts: whether the MLPs are mixtures of experts.
    """

    architecture: str
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    experts: bool = False


LADDER = "ladder_jax"
"""Our own `model_type`: see modeling_ladder.py."""

_QWEN2_MOE = {
    "num_key_value_heads": 16,
    "use_sliding_window": False,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_QWEN3_MOE = {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_OLMOE = {
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
_MIXTRAL = {
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,  # without such a field
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", {"num_key_value_heads": 32, "use_sliding_window": False}, qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False}, QKNorm.HEAD
    ),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _QWEN2_MOE, qkv_bias=True, experts=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _QWEN3_MOE, QKNorm.HEAD, experts=True),
    "olmoe": Family("OlmoeForCausalLM", _OLMOE, QKNorm.ALL, experts=True),
    "mixtral": Family("MixtralForCausalLM", _MIXTRAL, experts=True),
    LADDER: Family("LadderForCausalLM"),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
_COMPRESSED = ("quantization_config", "compression_config")


def check_expressible(config: Mapping[str, Any], *, where: str) -> None:
    """Raises UserError for the first field that changes the model's function in a way that we cannot represent.

    Unknown fields are allowed: transformers' classes of these families ignore them too.
    """

    def refuse(field: str, reason: str) -> None:
        raise UserError(f"{where}: {field}={config[field]!r} cannot be represented: {reason}")

    family = FAMILIES[config["model_type"]]
    for field in () if family.experts or config["model_type"] == LADDER else _EXPERTS:
        if config.get(field):
            refuse(field, f"a {config['model_type']} has no experts")
    for field in _COMPRESSED:
        if config.get(field):
            refuse(field, "quantized weights have to be dequantized first")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "the MLP is a SwiGLU (allowed: 'silu')")
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", "attention sees all positions (allowed: false)")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        refuse("sliding_window", "attention sees all positions (allowed: null)")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        refuse("layer_types", "attention sees all positions in every layer (allowed: 'full_attention')")
    if config.get("auto_map") and config.get("model_type") != LADDER:
        refuse("auto_map", "the model has its own program, which may compute anything")
    if config.get("clip_qkv") is not None:
        refuse("clip_qkv", "queries, keys and values are not clipped (allowed: null)")
    if config.get("is_encoder_decoder"):
        refuse("is_encoder_decoder", "only decoders are supported")
