"""The ModelConfig of a GGUF file. A setting that a dense Llama cannot express is refused by name."""

from typing import Any

import numpy as np

from ladder_jax.config import Biases, Dtype, ModelConfig, RopeScaling
from ladder_jax.errors import UserError, unknown
from ladder_jax.nn import attention
from ladder_jax.pretrained.gguf.file import File

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral, SmolLM2 and Llama 1 to 3.2 are "llama"."""

FACTORS = "rope_freqs.weight"
"""The tensor of divisors of the rotary frequencies, as in Llama 3.1's scaling."""

# Settings of the architecture that have no effect here.
WITHOUT_EFFECT = {"vocab_size", "context_length", "rope.scaling.original_context_length", "tensor_data_layout"}
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


class Settings:
    """The settings of the architecture, such as "llama.block_count". Remembers which were read."""

    def __init__(self, file: File):
        self.path, self._fields = file.path, file.fields
        self.architecture = file.fields.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise unknown(f"architecture in {file.path!r}:", self.architecture, ARCHITECTURES)
        self._supported = {*WITHOUT_EFFECT, *NEUTRAL}

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The setting as an int or float. Raises UserError if it has another type, or is missing without a default."""
        self._supported.add(name)
        full = f"{self.architecture}.{name}"
        value = self._fields.get(full, default)
        if value is None:
            raise UserError(f"{self.path!r} does not say {full}")
        if isinstance(value, (list, bool)) or not isinstance(value, (kind, int)):
            raise UserError(f"{self.path!r}: {full} must be one {kind.__name__} for all layers, not {value!r}"[:300])
        # Stored as float32: 9.999999747378752e-06 stands for 1e-05.
        return float(str(np.float32(value))) if kind is float else value

    def check_rest(self) -> None:
        """Raises UserError for a setting that was not read, and might change what the model computes."""
        for full, value in self._fields.items():
            name = full.removeprefix(f"{self.architecture}.")
            if name != full and (name not in self._supported or value not in NEUTRAL.get(name, (value,))):
                raise UserError(f"{self.path!r} sets {full}={value!r}, which is not supported"[:300])


def model_of(file: File) -> ModelConfig:
    """The configuration. Raises UserError for another architecture, and for missing, wrong or unsupported settings."""
    settings, tensors = Settings(file), file.tensors
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise UserError(f"{file.path!r} has no table token_embd.weight")
    num_layers, heads = settings.get("block_count", int), settings.get("attention.head_count", int)
    d_model = settings.get("embedding_length", int)
    head_dim = settings.get("attention.key_length", int, default=d_model // max(heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := settings.get(name, int, default=head_dim)) != head_dim:
            full = f"{settings.architecture}.{name}"
            raise UserError(f"{file.path!r} sets {full}={size}, which is not supported with heads of {head_dim}")
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
    names = {name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
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
    """The scaling that has the stored factors. Its other numbers are not stored: all published models use our defaults.

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
