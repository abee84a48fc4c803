"""The names of tensors in GGUF files and of our arrays, and the conversion of their layouts.

GGUF's matrices are [out, in], as Hugging Face's; ours are [in, out], with heads as separate dimensions. In "llama"
files, queries and keys have the order of interleaved rotary embedding, which rotates dimensions 2i and 2i + 1 together.
Ours, and Hugging Face's, rotates dimensions i and i + H/2 together.
"""

import functools
from collections.abc import Callable

import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.pretrained import linear
from ladder_jax.pretrained.gguf.file import File, Tensor
from ladder_jax.pretrained.gguf.model import FACTORS
from ladder_jax.pretrained.source import Key, Stored, check_layers, dims, expected_shapes

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


def arrays(file: File, model: ModelConfig) -> dict[Key, Stored]:
    """All arrays of the model. Raises UserError if a tensor is missing, extra, or of another shape."""
    check_layers(model, tensors=len(file.tensors), path=file.path)
    letters, used = dims(model), {FACTORS}
    interleaved = file.fields["general.architecture"] in INTERLEAVED
    stored = {}
    for key, shape in expected_shapes(model).items():
        name = stored_name(key)
        used.add(name)
        if name not in file.tensors:
            stored[key] = _zero_bias(file, key, shape, name)
            continue
        tensor, axes = file.tensors[name], letters[key.name]
        flat = linear.shape(axes, shape)
        if tensor.shape != flat:
            raise UserError(f"{file.path!r}: {name} is {tensor.shape}, not {flat}")
        heads = shape[axes.index("H") - 1] if interleaved and key.name.removeprefix("layers/") in ROTATED else None
        stored[key] = Stored(shape, tensor.dtype, functools.partial(_read, tensor, axes, shape, heads))
    for name in file.tensors.keys() - used:
        raise UserError(f"{file.path!r} holds {name}, which a dense Llama does not have")
    return stored


def stored_name(key: Key) -> str:
    """The tensor's name: "blk.3.attn_q.weight"."""
    if key.layer is None:
        return OUTSIDE_LAYERS[key.name]
    return f"blk.{key.layer}.{IN_LAYER[key.name.removeprefix('layers/')]}"


def _zero_bias(file: File, key: Key, shape: tuple[int, ...], name: str) -> Stored:
    """Zeros, for a bias that is missing in a file with other biases. Raises UserError for other missing tensors."""
    if not key.name.endswith("_bias"):
        raise UserError(f"{file.path!r} lacks {name}")
    zeros: Callable[[], np.ndarray] = functools.partial(np.zeros, shape, np.float32)
    return Stored(shape, np.dtype("float32"), zeros)


def _read(tensor: Tensor, letters: str, shape: tuple[int, ...], heads: int | None) -> np.ndarray:
    values = tensor.read()
    if heads is not None:
        values = rotate_half_order(values, heads=heads)
    return linear.to_ours(values, dims=letters, ours=shape)


def rotate_half_order(values: np.ndarray, *, heads: int) -> np.ndarray:
    """Reorder rows [heads x H, ...] from interleaved pairs (2i, 2i + 1) to pairs of halves (i, i + H/2)."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)
