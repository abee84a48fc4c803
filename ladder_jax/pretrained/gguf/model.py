"""Read a GGUF file as a Source. A setting that a dense Llama cannot express is refused by name.

GGUF's matrices are [out, in], as Hugging Face's; ours are [in, out], with heads as separate
dimensions. In "llama" files, queries and keys have the order of interleaved rotary embedding, which
rotates dimensions 2i and 2i + 1 together. Ours, and Hugging Face's, rotates dimensions i and i +
H/2 together.
"""

import functools
import pathlib
from typing import Any

import numpy as np

from ladder_jax.config import Biases, Dtype, ModelConfig, RopeScaling
from ladder_jax.errors import UserError, unknown
from ladder_jax.nn import attention
from ladder_jax.pretrained import source
from ladder_jax.pretrained.gguf.file import File, Tensor, open_file
from ladder_jax.pretrained.source import Key, Source, Stored

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral, SmolLM2 and Llama 1 to 3.2 are "llama"."""

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies, as in Llama 3.1's scaling."""

OUTSIDE_LAYERS = {
    "embedding/table": "token_embd.weight",
    "final_norm/scale": "output_norm.weight",
    "head/table": "output.weight",
}
IN_LAYER = {
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
ROTATED = ("attention/query", "attention/key", "attention/query_bias", "attention/key_bias")
INTERLEAVED = ("llama",)

# Settings of the architecture that have no effect here.
WITHOUT_EFFECT = {
    "vocab_size",
    "context_length",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
}
WITHOUT_EFFECT |= {"rope.scaling.finetuned", "attention.value_length"}
# Settings of the architecture that may only have these values, which have no effect.
NEUTRAL = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "use_parallel_residual": (False,),
}


def read(path: pathlib.Path) -> Source:
    """The model at `path`, without reading weights yet.

    Raises UserError if the file is damaged or cut off, the architecture or a setting is not
    supported, or the tokenizer does not fit the model.
    """
    from ladder_jax.pretrained.gguf import tokenizer  # whose library is slow to import

    file = open_file(path)
    if file.get("split.count", int, 1) > 1:
        raise UserError(
            f"{str(path)!r} is one of several parts: join them first (llama-gguf-split --merge)"
        )
    try:
        model = model_of(file)
    except UserError as error:  # ModelConfig's errors do not name the file
        raise (error if str(path) in str(error) else UserError(f"{str(path)!r}: {error}")) from None
    return Source(
        path=str(path),
        model=model,
        arrays=_arrays(file, model),
        context=file.get(f"{file.fields['general.architecture']}.context_length", int),
        files=tokenizer.files(file, vocab_size=model.vocab_size),
        generation=_generation(file),
    )


class Settings:
    """The settings of the architecture, such as "llama.block_count". Remembers which were read."""

    def __init__(self, file: File):
        self._file = file
        self.architecture = file.get("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise unknown(f"architecture in {file.path!r}:", self.architecture, ARCHITECTURES)
        self._supported = {*WITHOUT_EFFECT, *NEUTRAL}

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The setting as an int or float. Raises UserError if it has another type, or is missing
        without a default.
        """
        self._supported.add(name)
        full = f"{self.architecture}.{name}"
        value = self._file.get(full, kind, default)
        if value is None:
            raise UserError(f"{self._file.path!r} does not say {full}")
        # Stored as float32: 9.999999747378752e-06 stands for 1e-05.
        return float(str(np.float32(value))) if kind is float else value

    def check_rest(self) -> None:
        """Raises UserError for a setting that was not read, and might change what the model
        computes.
        """
        for full, value in self._file.fields.items():
            name = full.removeprefix(f"{self.architecture}.")
            if name != full and (
                name not in self._supported or value not in NEUTRAL.get(name, (value,))
            ):
                raise UserError(
                    f"{self._file.path!r} sets {full}={value!r}, which is not supported"[:300]
                )


def model_of(file: File) -> ModelConfig:
    """The configuration. Raises UserError for another architecture, and for missing, wrong or
    unsupported settings.
    """
    settings, tensors = Settings(file), file.tensors
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise UserError(f"{file.path!r} has no table token_embd.weight")
    num_layers, heads = settings.get("block_count", int), settings.get("attention.head_count", int)
    d_model = settings.get("embedding_length", int)
    head_dim = settings.get("attention.key_length", int, default=d_model // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := settings.get(name, int, default=head_dim)) != head_dim:
            full = f"{settings.architecture}.{name}"
            raise UserError(
                f"{file.path!r} sets {full}={size}, which is not supported with heads of {head_dim}"
            )
    theta = settings.get("rope.freq_base", float, default=10_000.0)
    model = ModelConfig(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=settings.get("attention.head_count_kv", int, default=heads),
        head_dim=head_dim,
        d_ff=settings.get("feed_forward_length", int),
        vocab_size=tensors["token_embd.weight"].shape[0],
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, theta=theta, head_dim=head_dim),
        norm_eps=settings.get("attention.layer_norm_rms_epsilon", float),
        tie_embeddings="output.weight" not in tensors,
        biases=_biases(file),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        residual="standard",
        dtype=_dtype(file),
        residual_dtype=_dtype(file),
    )
    settings.check_rest()
    return model


def _biases(file: File) -> Biases:
    names = {
        name.split(".")[2]
        for name in file.tensors
        if name.startswith("blk.") and name.endswith(".bias")
    }
    if not names:
        return Biases.NONE
    if names <= {"attn_q", "attn_k", "attn_v"}:
        return Biases.QKV
    return Biases.ATTENTION if all(name.startswith("attn_") for name in names) else Biases.ALL


def _dtype(file: File) -> Dtype:
    """The compute dtype: float32 if all tensors are stored in float32, else bfloat16."""
    all_float32 = all(tensor.kind == "F32" for tensor in file.tensors.values())
    return Dtype.FLOAT32 if all_float32 else Dtype.BFLOAT16


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


def _arrays(file: File, model: ModelConfig) -> dict[Key, Stored]:
    """All arrays of the model. Raises UserError if a tensor is missing, extra, or of another
    shape.
    """
    source.check_layers(model, tensors=len(file.tensors), path=file.path)
    letters, used = source.dims(model), {FACTORS}
    interleaved = file.fields["general.architecture"] in INTERLEAVED
    stored = {}
    for key, shape in source.expected_shapes(model).items():
        name = stored_name(key)
        used.add(name)
        if name not in file.tensors:
            raise UserError(f"{file.path!r} lacks {name}")
        tensor, axes = file.tensors[name], letters[key.name]
        flat = source.torch_shape(axes, shape)
        if tensor.shape != flat:
            raise UserError(f"{file.path!r}: {name} is {tensor.shape}, not {flat}")
        heads = (
            shape[axes.index("H") - 1]
            if interleaved and key.name.removeprefix("layers/") in ROTATED
            else None
        )
        stored[key] = Stored(
            shape, tensor.dtype, functools.partial(_read, tensor, axes, shape, heads)
        )
    for name in file.tensors.keys() - used:
        raise UserError(f"{file.path!r} holds {name}, which a dense Llama does not have")
    return stored


def stored_name(key: Key) -> str:
    """The tensor's name: "blk.3.attn_q.weight"."""
    if key.layer is None:
        return OUTSIDE_LAYERS[key.name]
    return f"blk.{key.layer}.{IN_LAYER[key.name.removeprefix('layers/')]}"


def _read(tensor: Tensor, letters: str, shape: tuple[int, ...], heads: int | None) -> np.ndarray:
    values = tensor.read()
    if heads is not None:
        values = _rotate_half_order(values, heads=heads)
    return source.from_torch(values, dims=letters, ours=shape)


def _rotate_half_order(values: np.ndarray, *, heads: int) -> np.ndarray:
    """Reorder rows [heads x H, ...] from interleaved pairs (2i, 2i + 1) to pairs of halves
    (i, i + H/2).
    """
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _generation(file: File) -> dict[str, Any]:
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
    return {name: number for name, number in tokens.items() if number is not None}
