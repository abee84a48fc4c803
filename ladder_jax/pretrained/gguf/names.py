"""Which tensor of a GGUF file is which array of ours, and how its values are laid out.

GGUF's matrices are [out, in], as Hugging Face's; ours [in, out], with heads apart. For "llama", its queries and keys
stand in the order of interleaved rotary embedding, where dimensions 2i and 2i + 1 are a pair; ours, as Hugging Face's,
pair i with i + H/2.
"""

import functools
from collections.abc import Callable

import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError
from ladder_jax.pretrained import linear
from ladder_jax.pretrained.gguf.file import File, Tensor
from ladder_jax.pretrained.gguf.model import FACTORS
from ladder_jax.pretrained.source import Key, Stored, check_layers, dims, wanted

WHOLE = {
    "embedding/table": "token_embd.weight",
    "final_norm/scale": "output_norm.weight",
    "head/table": "output.weight",
}
OF_A_LAYER = {
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
    """Every array of the model. Raises UserError where a tensor is missing, too many, or of another shape."""
    check_layers(model, tensors=len(file.tensors), path=file.path)
    letters, used = dims(model), {FACTORS}
    interleaved = file.fields["general.architecture"] in INTERLEAVED
    found = {}
    for key, shape in wanted(model).items():
        name = stored_name(key)
        used.add(name)
        if name not in file.tensors:
            found[key] = _absent(file, key, shape, name)
            continue
        tensor, of = file.tensors[name], letters[key.name]
        flat = linear.shape(of, shape)
        if tensor.shape != flat:
            raise UserError(f"{file.path!r}: {name} is {tensor.shape}, not {flat}")
        heads = shape[of.index("H") - 1] if interleaved and key.name.removeprefix("layers/") in ROTATED else None
        found[key] = Stored(shape, tensor.dtype, functools.partial(_read, tensor, of, shape, heads))
    for name in file.tensors.keys() - used:
        raise UserError(f"{file.path!r} holds {name}, for which a dense Llama has no place")
    return found


def stored_name(key: Key) -> str:
    """The tensor's name: "blk.3.attn_q.weight"."""
    if key.layer is None:
        return WHOLE[key.name]
    return f"blk.{key.layer}.{OF_A_LAYER[key.name.removeprefix('layers/')]}"


def _absent(file: File, key: Key, shape: tuple[int, ...], name: str) -> Stored:
    """Biases that a file lacks, where it has others, are zero."""
    if not key.name.endswith("_bias"):
        raise UserError(f"{file.path!r} lacks {name}")
    zeros: Callable[[], np.ndarray] = functools.partial(np.zeros, shape, np.float32)
    return Stored(shape, np.dtype("float32"), zeros)


def _read(tensor: Tensor, of: str, shape: tuple[int, ...], heads: int | None) -> np.ndarray:
    values = tensor.read()
    if heads is not None:
        values = rotate_half_order(values, heads=heads)
    return linear.to_ours(values, dims=of, ours=shape)


def rotate_half_order(values: np.ndarray, *, heads: int) -> np.ndarray:
    """Rows [heads x H, ...] from the order of interleaved pairs to that of halves."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)
