"""Convert `config.json` to a ModelConfig. An error names the field that cannot be represented."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ladder_jax.config import Biases, Dtype, ModelConfig, MoEConfig, QKNorm, RopeScaling, RouterSoftmax
from ladder_jax.errors import UserError, member, unknown
from ladder_jax.pretrained.huggingface import families
from ladder_jax.pretrained.huggingface.families import FAMILIES, LADDER, Family

_NUMBER = (int, float)
ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
"""RopeScaling's field names, and Hugging Face's."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Reads the fields of a JSON object, and checks their types. where: the file, for messages."""

    config: Mapping[str, Any]
    where: str

    def __call__(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self.config.get(name)
        if value is None:
            if default is ...:
                raise UserError(f"{self.where} has no {name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            expected = {int: "an integer", bool: "true or false", str: "text"}.get(kind, "a number")
            raise UserError(f"{self.where}: {name} must be {expected}, not {value!r}")
        return value


def model(config: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The ModelConfig of a `config.json` of transformers 4 or 5. Raises UserError for a field it cannot represent.

    For float16 the compute dtype is bfloat16; stored values are unchanged.
    """
    family_name = _Fields(config, where)("model_type", str)
    if family_name not in FAMILIES:
        raise unknown("model_type", family_name, FAMILIES)
    family = FAMILIES[family_name]
    config = {**family.defaults, **config}
    families.check_expressible(config, where=where)
    get = _Fields(config, where)
    theta, scaling = _rope(config, where)
    dtype = _dtype(config, where)
    heads = get("num_attention_heads", int)
    experts = family.experts or config.get("num_experts")
    mlp = dict(d_ff=get("intermediate_size", int)) if not experts else dict(moe=_experts(get))
    if experts and mlp["moe"].dense_layers:
        mlp["d_ff"] = get("intermediate_size", int)
    return ModelConfig(
        num_layers=get("num_hidden_layers", int),
        d_model=get("hidden_size", int),
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", int, heads),
        head_dim=get("head_dim", int, None),
        **mlp,
        vocab_size=get("vocab_size", int),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=get("rms_norm_eps", _NUMBER, 1e-6),
        tie_embeddings=get("tie_word_embeddings", bool, False),
        dtype=dtype,
        residual_dtype=dtype,
        **(_ladder(get) if family_name == LADDER else _standard(get, family)),
    )


def _standard(get: _Fields, family: Family) -> dict[str, Any]:
    attention, mlp = get("attention_bias", bool, False), get("mlp_bias", bool, False)
    if mlp and not attention:
        raise UserError(f"{get.where}: mlp_bias=true cannot be represented without attention_bias=true")
    biases = Biases.ALL if mlp else Biases.ATTENTION if attention else Biases.NONE
    qkv_bias = family.qkv_bias and (not family.experts or get("qkv_bias", bool, True))
    return dict(residual="standard", qk_norm=family.qk_norm, biases=Biases.QKV if qkv_bias else biases)


def _experts(get: _Fields) -> MoEConfig:
    """Of transformers 4 and 5, which call the number of experts by two names."""
    count = get("num_local_experts", int, None) or get("num_experts", int)
    width = get("moe_intermediate_size", int, None) or get("intermediate_size", int)
    shared = get("shared_expert_intermediate_size", int, 0)
    gate = get("shared_expert_gate", bool, shared > 0)  # of Ladder; Qwen2-MoE has always one
    softmax = RouterSoftmax.CHOSEN if get("norm_topk_prob", bool, False) else RouterSoftmax.ALL
    return MoEConfig(
        experts=count,
        top_k=get("num_experts_per_tok", int),
        expert_width=width,
        softmax=softmax,
        shared_width=shared,
        shared_gate=gate,
        dense_layers=_dense_layers(get),
    )


def _dense_layers(get: _Fields) -> int:
    """How many of the first layers have no experts, of Qwen's two fields."""
    count, listed = get("num_hidden_layers", int), get("mlp_only_layers", list, [])
    every = get("decoder_sparse_step", int, 1)  # layers every - 1, 2 every - 1, ... have experts
    of_experts = range(every - 1, count, every) if every > 0 else ()
    first = next((layer for layer in of_experts if layer not in listed), count)
    later = any(isinstance(layer, int) and first < layer < count for layer in listed) or every > 1 and first + 1 < count
    if count and (later or first == count):
        name = "mlp_only_layers" if listed else "decoder_sparse_step"
        raise UserError(
            f"{get.where}: {name}={get.config.get(name)!r} cannot be represented: the layers without experts must be"
            f" the first ones, and not all {count}"
        )
    return first


def _ladder(get: _Fields) -> dict[str, Any]:
    layers = get("ladder_layers", list, None)
    return dict(
        residual=get("residual", str),
        ladder_layers=None if layers is None else ",".join(map(str, layers)) + ",",
        qk_norm=QKNorm.ALL if get.config.get("qk_norm") == QKNorm.ALL.value else get("qk_norm", bool),
        biases=member(Biases, "biases", get("biases", str)),
    )


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling: `rope_theta` and `rope_scaling` of transformers 4, or `rope_parameters` of 5.

    If both are present, `rope_scaling` counts, as in transformers.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(field) or {}
    if not isinstance(parameters, Mapping):
        raise UserError(f"{where}: {field} must be an object, not {parameters!r}")
    get = _Fields({"rope_theta": config.get("rope_theta"), **parameters}, f"{where}: {field}")
    for name, section in (("partial_rotary_factor", config), (f"{field}.partial_rotary_factor", parameters)):
        if section.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UserError(f"{where}: {name} cannot be represented: every dimension of a head is rotated")
    kind = get("rope_type", str, get("type", str, "default"))
    theta = float(get("rope_theta", _NUMBER, 10_000.0))
    if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        raise UserError(f"{where}: {field} differs between layers ({', '.join(nested)}), which cannot be represented")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{where}: {field}: rope_type={kind!r} cannot be represented (allowed: default, llama3)")
    return theta, RopeScaling(**{ours: get(theirs, _NUMBER) for ours, theirs in ROPE_FIELDS.items()})


def _dtype(config: Mapping[str, Any], where: str) -> Dtype:
    field = "dtype" if config.get("dtype") else "torch_dtype"
    name = _Fields(config, where)(field, str, "float32")
    allowed = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.BFLOAT16}
    if name not in allowed:
        raise unknown(field, name, allowed)
    return allowed[name]


def context(config: Mapping[str, Any], *, where: str) -> int | None:
    """The longest sequence that the model was trained for, in tokens; None if the file has no such field."""
    return _Fields(config, where)("max_position_embeddings", int, None)
