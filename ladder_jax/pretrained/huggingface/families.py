"""The families of Hugging Face models that we can represent, and what their `config.json` must not say."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Family:
    """architecture: transformers' class. defaults: what transformers assumes where the file says nothing.

    qk_norm: whether queries and keys are normalised; qkv_bias: whether their projections always have a bias.
    """

    architecture: str
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    qk_norm: bool = False
    qkv_bias: bool = False


LADDER = "ladder_jax"
"""The `model_type` of our own: see modeling_ladder.py."""

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", {"num_key_value_heads": 32, "use_sliding_window": False}, qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"num_key_value_heads": 32, "head_dim": 128, "use_sliding_window": False}, qk_norm=True
    ),
    LADDER: Family("LadderForCausalLM"),
}

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
_COMPRESSED = ("quantization_config", "compression_config")


def check_expressible(config: Mapping[str, Any], *, where: str) -> None:
    """Raises UserError, with the field's name, for what would make the model another function than ours.

    Fields that are not known here do not: transformers' classes of these families ignore them, too.
    """

    def refuse(field: str, why: str) -> None:
        raise UserError(f"{where}: {field}={config[field]!r} cannot be represented: {why}")

    for field in _EXPERTS:
        if config.get(field):
            refuse(field, "mixtures of experts are not supported")
    for field in _COMPRESSED:
        if config.get(field):
            refuse(field, "quantized weights have to be dequantized first")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "the MLP is a SwiGLU (allowed: 'silu')")
    if config.get("use_sliding_window"):
        refuse("use_sliding_window", "attention sees all positions (allowed: false)")
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        refuse("sliding_window", "attention sees all positions (allowed: null)")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        refuse("layer_types", "attention sees all positions in every layer (allowed: 'full_attention')")
    if config.get("auto_map") and config.get("model_type") != LADDER:
        refuse("auto_map", "the model brings a program of its own, which may compute anything")
    if config.get("is_encoder_decoder"):
        refuse("is_encoder_decoder", "only decoders are supported")
