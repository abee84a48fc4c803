"""Read a GGUF file as a Source. A setting that a dense Llama cannot express is refused by name.

GGUF's matrices are [out, in], as Hugging Face's; ours are [in, out], with heads as separate
dimensions. In "llama" files, queries and keys have the order of interleaved rotary embedding, which
rotates dimensions 2i and 2i + 1 together. Ours, and Hugging Face's, rotates dimensions i and i +
H/2 together.
"""

import dataclasses
import functools
import pathlib

import numpy as np

from ladder_jax.config import Biases, Dtype, Json, ModelConfig, RopeScaling
from ladder_jax.config.fields import not_none
from ladder_jax.errors import UserError, unknown
from ladder_jax.nn import attention
from ladder_jax.pretrained import tensors
from ladder_jax.pretrained.gguf.file import File, open_file
from ladder_jax.pretrained.source import Arrays, Source, Stored
from ladder_jax.pretrained.tensors import Names

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral, SmolLM2 and Llama 1 to 3.2 are "llama"."""

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies, as in Llama 3.1's scaling."""

_OUTSIDE_LAYERS = {
    "embedding/table": "token_embd.weight",
    "final_norm/scale": "output_norm.weight",
    "head/table": "output.weight",
}
_IN_LAYER = {
    "attention_norm/scale": "attn_norm.weight",
    "attention/query": "attn_q.weight",
    "attention/key": "attn_k.weight",
    "attention/value": "attn_v.weight",
    "attention/out": "attn_output.weight",
    "attention/query_bias": "attn_q.bias",
    "attention/key_bias": "attn_k.bias",
    "attention/value_bias": "attn_v.bias",
    "attention/out_bias": "attn_output.bias",
    "attention/query_norm/scale": "attn_q_norm.weight",
    "attention/key_norm/scale": "attn_k_norm.weight",
    "mlp_norm/scale": "ffn_norm.weight",
    "mlp/gate": "ffn_gate.weight",
    "mlp/up": "ffn_up.weight",
    "mlp/down": "ffn_down.weight",
    "mlp/gate_bias": "ffn_gate.bias",
    "mlp/up_bias": "ffn_up.bias",
    "mlp/down_bias": "ffn_down.bias",
}
NAMES = Names("blk.", _OUTSIDE_LAYERS, _IN_LAYER)
INTERLEAVED = "llama"

# Settings of the architecture that are read, or have no effect here.
SUPPORTED = {
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "context_length",
    "tensor_data_layout",
}
# Settings of the architecture that may only have these values, which have no effect.
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 0,
    "attention.causal": True,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scale_linear": 1.0,
    "use_parallel_residual": False,
}


def read(path: pathlib.Path) -> Source:
    """The model at `path`, without reading weights yet.

    Raises UserError if the file is damaged or cut off, the architecture or a setting is not
    supported, or the tokenizer does not fit the model.
    """
    from ladder_jax.pretrained.gguf import tokenizer  # whose library is slow to import

    file = open_file(path)
    where = str(path)
    if file.get("split.count", int, 1) > 1:
        raise UserError(
            f"{where!r} is one of several parts: join them first (llama-gguf-split --merge)"
        )
    try:
        model = model_of(file)
    except UserError as error:  # ModelConfig's errors do not name the file
        if where in str(error):
            raise error from None
        raise UserError(f"{where!r}: {error}") from None
    return Source(
        path=where,
        model=model,
        arrays=_arrays(file, model),
        context=file.get(f"{file.fields['general.architecture']}.context_length", int),
        files=tokenizer.files(file),
        generation=_generation(file),
    )


def _check_settings(file: File, architecture: str) -> None:
    """Raises UserError for a setting that is not read, and might change what the model computes."""
    for full, value in file.fields.items():
        prefix, _, name = full.partition(f"{architecture}.")
        if prefix or name in SUPPORTED or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        raise UserError(f"{file.path!r} sets {full}={value!r}, which is not supported"[:300])


def model_of(file: File) -> ModelConfig:
    """The configuration. Raises UserError for another architecture, and for missing, wrong or
    unsupported settings.
    """
    architecture = file.get("general.architecture", str)
    found = file.tensors
    if architecture not in ARCHITECTURES:
        raise unknown(f"architecture in {file.path!r}:", architecture, ARCHITECTURES)
    _check_settings(file, architecture)
    if "token_embd.weight" not in found or len(found["token_embd.weight"].shape) != 2:
        raise UserError(f"{file.path!r} has no table token_embd.weight")
    get = lambda name, kind, default=...: file.get(f"{architecture}.{name}", kind, default)
    num_layers = get("block_count", int)
    heads = get("attention.head_count", int)
    d_model = get("embedding_length", int)
    head_dim = get("attention.key_length", int, d_model // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := get(name, int, head_dim)) != head_dim:
            full = f"{architecture}.{name}"
            raise UserError(
                f"{file.path!r} sets {full}={size}, which is not supported with heads of {head_dim}"
            )
    theta = _shortest(get("rope.freq_base", float, 10_000.0))
    dtype = Dtype.FLOAT32 if file.kinds == {"F32"} else Dtype.BFLOAT16
    return ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        d_ff=get("feed_forward_length", int),
        vocab_size=found["token_embd.weight"].shape[0],
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta=theta, head_dim=head_dim),
        norm_eps=_shortest(get("attention.layer_norm_rms_epsilon", float)),
        tie_embeddings="output.weight" not in found,
        biases=_biases(file),
        qk_norm="blk.0.attn_q_norm.weight" in found,
        residual="standard",
        dtype=dtype,
        residual_dtype=dtype,
    )


def _shortest(value: float) -> float:
    """Stored as float32: 9.999999747378752e-06 stands for 1e-05."""
    return float(str(np.float32(value)))


def _biases(file: File) -> Biases:
    """By those of the first layer, which the others must have, too."""
    parts = {"ffn_up": Biases.ALL, "attn_output": Biases.ATTENTION, "attn_q": Biases.QKV}
    for part, biases in parts.items():
        if f"blk.0.{part}.bias" in file.tensors:
            return biases
    return Biases.NONE


def _rope_scaling(file: File, *, theta: float, head_dim: int) -> RopeScaling | None:
    """The scaling that has the stored factors. Its other numbers are not stored: all published
    models use our defaults.

    None if there are no factors. Raises UserError for another kind of scaling.
    """
    if FACTORS not in file.tensors:
        return None
    stored = file.tensors[FACTORS].read().astype(np.float64)
    unscaled = ModelConfig(rope_theta=theta, head_dim=head_dim)
    factor = float(stored.max())
    if factor > 1 and stored.shape == (head_dim // 2,):
        scaling = RopeScaling(factor=factor)
        plain = attention.rotary_frequencies(unscaled)
        expected = plain / attention.rotary_frequencies(
            ModelConfig(rope_theta=theta, head_dim=head_dim, rope_scaling=scaling)
        )
        if np.allclose(stored, expected, rtol=1e-5):
            return scaling
    raise UserError(
        f"{file.path!r}: the factors in {FACTORS} are not those of Llama 3's scaling, the only one supported"
    )


def _arrays(file: File, model: ModelConfig) -> Arrays:
    """All arrays of the model. Raises UserError as `tensors.arrays` does."""
    found = {name: one for name, one in file.tensors.items() if name != FACTORS}
    if file.fields["general.architecture"] == INTERLEAVED:
        for part, heads in ((".attn_q.", model.num_heads), (".attn_k.", model.num_kv_heads)):
            for name in [name for name in found if part in name]:
                read = functools.partial(_rotate_half_order, found[name], heads=heads)
                found[name] = dataclasses.replace(found[name], read=read)
    return tensors.arrays(file.path, model, found, NAMES)


def _rotate_half_order(stored: Stored, *, heads: int) -> np.ndarray:
    """Values whose rows [heads x H, ...] go from interleaved pairs (2i, 2i + 1) to pairs of halves
    (i, i + H/2).
    """
    rows, *rest = stored.shape
    pairs = stored.read().reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(stored.shape)


def _generation(file: File) -> Json:
    """The special tokens, the only generation settings in a GGUF file. An end-of-turn token also
    ends a text.
    """
    token = lambda name: file.get(f"tokenizer.ggml.{name}_token_id", int)
    ends = list(
        dict.fromkeys(token(name) for name in ("eos", "eot", "eom") if token(name) is not None)
    )
    tokens = {
        "bos_token_id": token("bos"),
        "eos_token_id": ends or None,
        "pad_token_id": token("padding"),
    }
    return not_none(tokens)
