"""The names of our arrays and of the tensors in Hugging Face's Llama, Mistral, Qwen2 and Qwen3, in one table."""

from ladder_jax.config import ModelConfig
from ladder_jax.nn.parameter import LAYERS
from ladder_jax.pretrained.source import Key

_BLOCK = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query": "self_attn.q_proj.weight",
    "attention/key": "self_attn.k_proj.weight",
    "attention/value": "self_attn.v_proj.weight",
    "attention/out": "self_attn.o_proj.weight",
    "attention/query_bias": "self_attn.q_proj.bias",
    "attention/key_bias": "self_attn.k_proj.bias",
    "attention/value_bias": "self_attn.v_proj.bias",
    "attention/out_bias": "self_attn.o_proj.bias",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate": "mlp.gate_proj.weight",
    "mlp/up": "mlp.up_proj.weight",
    "mlp/down": "mlp.down_proj.weight",
    "mlp/gate_bias": "mlp.gate_proj.bias",
    "mlp/up_bias": "mlp.up_proj.bias",
    "mlp/down_bias": "mlp.down_proj.bias",
}

TABLE = {
    "embedding/table": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/table": "lm_head.weight",
    **{f"layers/{ours}": f"model.layers.{{layer}}.{theirs}" for ours, theirs in _BLOCK.items()},
}
"""Both use rotary embedding in rotate-half form, so queries and keys need no permutation."""


def theirs(key: Key, *, model: ModelConfig) -> str:
    """Hugging Face's name: "model.layers.3.mlp.up_proj.weight" for `Key("layers/mlp/up", 3)`."""
    if key.layer is None:
        return TABLE[key.name]
    name = key.name.partition("/")[2]
    return TABLE[f"{LAYERS}/{name}"].format(layer=key.layers(model)[key.layer])


def is_derived(name: str) -> bool:
    """Whether a tensor only repeats the configuration: old files contain the rotary frequencies."""
    return name.endswith(".rotary_emb.inv_freq")
