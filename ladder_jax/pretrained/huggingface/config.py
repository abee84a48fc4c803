"""`config.json` as a ModelConfig, and back: for a class of transformers if there is one, else for
modeling_ladder.py.

An error names the field that cannot be represented.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from ladder_jax import residual
from ladder_jax.config import (
    Biases,
    Dtype,
    Json,
    ModelConfig,
    MoEConfig,
    QKNorm,
    RopeScaling,
    RouterSoftmax,
    layer_indices,
    parse_residual,
)
from ladder_jax.config.fields import member
from ladder_jax.errors import UserError, unknown
from ladder_jax.pretrained.fields import Fields

LADDER = "ladder_jax"
"""Our own `model_type`."""
MODELING = "modeling_ladder.py"
"""The program that is exported with models that transformers has no class for."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The generation settings in config.json, for folders without generation_config.json."""
ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context": "original_max_position_embeddings",
}
"""RopeScaling's field names, and Hugging Face's."""
_NUMBER = int | float
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
_COMPRESSED = "quantized weights have to be dequantized first"
_REFUSED = {
    "quantization_config": _COMPRESSED,
    "compression_config": _COMPRESSED,
    "use_sliding_window": "attention sees all positions (allowed: false)",
    "clip_qkv": "queries, keys and values are not clipped (allowed: null)",
    "is_encoder_decoder": "only decoders are supported",
}
"""Fields that, where they are set, change the model's function in a way that we cannot represent."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models that we can represent.

    architecture: transformers' class. fields: those that are written beside the ones of every
        family.
    defaults: of fields that the family's files have not. Others must be there, as transformers
        writes them.
    qk_norm: over which elements queries and keys are normalised. qkv_bias: whether the QKV
    projections have a bias, unless the file's qkv_bias says otherwise. experts: whether the MLPs
    are mixtures of experts.
    """

    architecture: str
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    experts: bool = False


_ROUTED = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits")
_SPARSE = (*_ROUTED, "moe_intermediate_size", "mlp_only_layers")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", ("attention_bias", "mlp_bias", "head_dim")),
    "mistral": Family("MistralForCausalLM", (), {"sliding_window": 4096}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        ("use_sliding_window", "head_dim"),
        {"use_sliding_window": False},
        qkv_bias=True,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        ("attention_bias", "use_sliding_window", "head_dim"),
        {"head_dim": 128, "use_sliding_window": False},
        QKNorm.HEAD,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (
            "sliding_window",
            "num_local_experts",
            "num_experts_per_tok",
            "output_router_logits",
            "head_dim",
        ),
        {"rope_theta": 1_000_000.0},
        experts=True,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (
            *("qkv_bias", "use_sliding_window", "head_dim"),
            *(*_SPARSE, "decoder_sparse_step", "shared_expert_intermediate_size"),
        ),
        {"use_sliding_window": False, "shared_expert_gate": True},
        qkv_bias=True,
        experts=True,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        ("attention_bias", "use_sliding_window", "head_dim", *_SPARSE, "decoder_sparse_step"),
        {"use_sliding_window": False},
        QKNorm.HEAD,
        experts=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", ("attention_bias", *_ROUTED), qk_norm=QKNorm.ALL, experts=True
    ),
    LADDER: Family(
        "LadderForCausalLM",
        (
            *("auto_map", "residual", "ladder_layers", "biases", "qk_norm", "head_dim"),
            *(*_SPARSE, "shared_expert_intermediate_size", "shared_expert_gate"),
        ),
    ),
}
"""By `model_type`. A model is written as the first one that it can be read back from."""


def _refused(get: Fields, name: str, reason: str) -> UserError:
    return UserError(
        f"{get.where}: {name}={get.values.get(name)!r} cannot be represented: {reason}"
    )


def read(config: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The ModelConfig of a `config.json` of transformers 4 or 5. Raises UserError for a field it
    cannot represent.

    For float16 the compute dtype is bfloat16; stored values are unchanged.
    """
    name = Fields(config, where)("model_type", str)
    if name not in FAMILIES:
        raise unknown("model_type", name, FAMILIES)
    family = FAMILIES[name]
    get = Fields({**family.defaults, **config}, where)
    _check_expressible(get, family)
    theta, scaling = _read_rope(get)
    dtype = _read_dtype(get)
    heads = get("num_attention_heads", int)
    moe = _read_experts(get, family) if family.experts or get.values.get("num_experts") else None
    has_mlp = moe is None or moe.dense_layers
    return ModelConfig(
        num_layers=get("num_hidden_layers", int),
        d_model=get("hidden_size", int),
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", int, heads),
        head_dim=get("head_dim", int, None),
        moe=moe,
        **({"d_ff": get("intermediate_size", int)} if has_mlp else {}),
        vocab_size=get("vocab_size", int),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=get("rms_norm_eps", _NUMBER),
        tie_embeddings=get("tie_word_embeddings", bool, False),
        dtype=dtype,
        residual_dtype=dtype,
        **(_read_ladder(get) if name == LADDER else _read_standard(get, family)),
    )


def _check_expressible(get: Fields, family: Family) -> None:
    """Raises UserError for the first field that changes the model's function in a way that we
    cannot represent.

    Unknown fields are allowed: transformers' classes of these families ignore them too.
    """
    told = get.values
    refused = dict(_REFUSED)
    if family is not FAMILIES[LADDER]:
        refused["auto_map"] = "the model has its own program, which may compute anything"
        if not family.experts:
            refused |= dict.fromkeys(_EXPERTS, f"a {told['model_type']} has no experts")
    if told.get("use_sliding_window") is not False:
        refused["sliding_window"] = "attention sees all positions (allowed: null)"
    for field, reason in refused.items():
        if told.get(field):
            raise _refused(get, field, reason)
    if told.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refused(get, "hidden_act", "the MLP is a SwiGLU (allowed: 'silu')")
    kinds = told.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise _refused(
            get,
            "layer_types",
            "attention sees all positions in every layer (allowed: 'full_attention')",
        )


def _read_standard(get: Fields, family: Family) -> dict[str, Any]:
    attention = get("attention_bias", bool, False)
    mlp = get("mlp_bias", bool, False)
    if mlp and not attention:
        raise UserError(
            f"{get.where}: mlp_bias=true cannot be represented without attention_bias=true"
        )
    if family.qkv_bias and (not family.experts or get("qkv_bias", bool, True)):
        biases = Biases.QKV
    elif mlp:
        biases = Biases.ALL
    elif attention:
        biases = Biases.ATTENTION
    else:
        biases = Biases.NONE
    return dict(residual="standard", qk_norm=family.qk_norm, biases=biases)


def _read_ladder(get: Fields) -> dict[str, Any]:
    layers = get("ladder_layers", list, None)
    return dict(
        residual=get("residual", str),
        ladder_layers=None if layers is None else ",".join(map(str, layers)) + ",",
        qk_norm=QKNorm.ALL
        if get.values.get("qk_norm") == QKNorm.ALL.value
        else get("qk_norm", bool),
        biases=member(Biases, "biases", get("biases", str)),
    )


def _read_experts(get: Fields, family: Family) -> MoEConfig:
    """Of transformers 4 and 5, which call the number of experts by two names."""
    always = "norm_topk_prob" not in family.fields  # a Mixtral, whatever its file says
    renormalised = always or get("norm_topk_prob", bool, False)
    return MoEConfig(
        experts=get("num_local_experts", int, None) or get("num_experts", int),
        top_k=get("num_experts_per_tok", int),
        expert_width=get("moe_intermediate_size", int, None) or get("intermediate_size", int),
        softmax=RouterSoftmax.CHOSEN if renormalised else RouterSoftmax.ALL,
        shared_width=get("shared_expert_intermediate_size", int, 0),
        shared_gate=get("shared_expert_gate", bool, False),
        dense_layers=_read_dense_layers(get),
    )


def _read_dense_layers(get: Fields) -> int:
    """How many of the first layers have no experts, of Qwen's two fields."""
    count = get("num_hidden_layers", int)
    listed = get("mlp_only_layers", list, [])
    if get("decoder_sparse_step", int, 1) != 1:
        raise _refused(
            get,
            "decoder_sparse_step",
            "the layers without experts must be the first ones (allowed: 1)",
        )
    dense = len(listed)
    if listed and (listed != list(range(dense)) or dense == count):
        raise _refused(
            get,
            "mlp_only_layers",
            f"the layers without experts must be the first ones, and not all {count}",
        )
    return dense


def _read_rope(told: Fields) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling: `rope_theta` and `rope_scaling` of transformers 4, or
    `rope_parameters` of 5.

    If both are present, `rope_scaling` counts, as in transformers.
    """
    config = told.values
    where = told.where
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = told(field, dict, {})
    inherited = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    get = Fields({**inherited, **parameters}, f"{where}: {field}")
    if get("partial_rotary_factor", _NUMBER, 1) != 1:
        raise _refused(get, "partial_rotary_factor", "every dimension of a head is rotated")
    kind = get("rope_type", str, get("type", str, "default"))
    theta = float(get("rope_theta", _NUMBER, 10_000.0))
    if nested := [name for name, value in parameters.items() if isinstance(value, dict)]:
        raise UserError(
            f"{where}: {field} differs between layers ({', '.join(nested)}), which cannot be represented"
        )
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(
            f"{where}: {field}: rope_type={kind!r} cannot be represented (allowed: default, llama3)"
        )
    return theta, RopeScaling(
        **{ours: get(theirs, _NUMBER) for ours, theirs in ROPE_FIELDS.items()}
    )


def _read_dtype(get: Fields) -> Dtype:
    field = "dtype" if get.values.get("dtype") else "torch_dtype"
    name = get(field, str, "float32")
    allowed = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.BFLOAT16}
    if name not in allowed:
        raise unknown(field, name, allowed)
    return allowed[name]


def check(model: ModelConfig) -> None:
    """Raises UserError for a model that cannot be written: if its function depends on the number of
    ranks, say.
    """
    name = parse_residual(model.residual)
    if name.depends_on_ranks or name.kind == "no-communication":
        raise UserError(
            f"a model with residual={model.residual!r} cannot be written for transformers: what it computes depends on"
            " the number of tensor-parallel ranks, of which PyTorch has one here"
        )
    if model.moe is not None and model.moe.router_bias:
        raise UserError("a model with model.moe.router_bias cannot be written for transformers")


def describe(model: ModelConfig, *, dtype: np.dtype, context: int, generation: Json) -> Json:
    """The contents of `config.json`. dtype: of the stored values. context: the longest sequence, in
    tokens.

    A standard model becomes a Llama, or with their biases or query and key norms a Qwen2 or Qwen3;
    with experts a Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE. For another model, the file names its
    topology, and modeling_ladder.py computes it. Raises UserError as `check` does.
    """
    check(model)
    told = _told(model)
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": told["intermediate_size"],
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_parameters": {"rope_theta": model.rope_theta, **_rope(model)},
        "torch_dtype": str(dtype),
        "dtype": str(dtype),
        **{name: generation.get(name) for name in TOKENS},
    }
    # For transformers 4, and programs that read its field names.
    older = {
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope(model) if model.rope_scaling else None,
    }
    for model_type, family in FAMILIES.items():
        own = {field: told[field] for field in family.fields if field in told}
        config = {"architectures": [family.architecture], "model_type": model_type, **own, **common}
        if model_type == LADDER:
            return config
        if _reads_back(config | older, model):
            return config | older


def _reads_back(config: Json, model: ModelConfig) -> bool:
    """Whether transformers' own class computes the model, of which `config` is written."""
    # Those classes require that the number of heads divides hidden_size, even if head_dim is set.
    if _told(model)["residual"] != "standard" or model.d_model % model.num_heads:
        return False
    try:
        return _told(read(config, where="")) == _told(model)
    except UserError:
        return False


def _told(model: ModelConfig) -> Json:
    """The fields that families write, or leave out where they can have one value only."""
    standard = residual.topology("standard", num_layers=model.num_layers)
    is_standard = residual.of_model(model) == standard
    listed = (
        None
        if model.ladder_layers is None
        else list(layer_indices(model.ladder_layers, model.num_layers))
    )
    program = MODELING.removesuffix(".py")
    moe = model.moe
    biases = model.biases
    told = {
        "auto_map": {
            "AutoConfig": f"{program}.LadderConfig",
            "AutoModelForCausalLM": f"{program}.LadderForCausalLM",
        },
        "residual": "standard" if is_standard else model.residual,
        "ladder_layers": None if is_standard else listed,
        "biases": biases.value,
        "qk_norm": model.qk_norm.value,
        "attention_bias": biases in (Biases.ATTENTION, Biases.ALL),
        "mlp_bias": biases is Biases.ALL,
        "qkv_bias": biases is Biases.QKV,
        "head_dim": model.head_dim,
        "sliding_window": None,
        "use_sliding_window": False,
        "intermediate_size": model.d_ff,
    }
    if moe is None:
        return told
    if not moe.dense_layers:  # then what transformers' own models have there
        told["intermediate_size"] = moe.shared_width or moe.expert_width
    return told | {
        "num_experts": moe.experts,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.softmax is RouterSoftmax.CHOSEN,
        "output_router_logits": False,
        "moe_intermediate_size": moe.expert_width,
        "mlp_only_layers": list(range(moe.dense_layers)),
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": moe.shared_width,
        "shared_expert_gate": moe.shared_gate,
    }


def _rope(model: ModelConfig) -> Json:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default"}
    return {
        "rope_type": "llama3",
        **{theirs: getattr(scaling, ours) for ours, theirs in ROPE_FIELDS.items()},
    }
