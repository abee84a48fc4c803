"""The weights of a Hugging Face folder: safetensors files
(https://huggingface.co/docs/safetensors), read one array at a time, and the names of their
tensors.

Of a file that is read, the `safetensors` library only checks the header: it would map the file, and
a mapped file that is truncated, or whose disk fails, ends the process with SIGBUS.

Both sides use rotary embedding in rotate-half form, so queries and keys need no permutation.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ladder_jax.errors import RunFailed, UserError, error_text, needed
from ladder_jax.files import reading
from ladder_jax.pretrained.source import Stored, from_file
from ladder_jax.pretrained.tensors import Names

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
_OUTSIDE_LAYERS = {
    "embedding/table": TABLE,
    "final_norm/scale": "model.norm.weight",
    "head/table": HEAD,
}
_IN_LAYER = {
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
    "mlp/router": "mlp.gate.weight",
    "mlp/experts/gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/experts/up": "mlp.experts.{expert}.up_proj.weight",
    "mlp/experts/down": "mlp.experts.{expert}.down_proj.weight",
    "mlp/shared/gate": "mlp.shared_expert.gate_proj.weight",
    "mlp/shared/up": "mlp.shared_expert.up_proj.weight",
    "mlp/shared/down": "mlp.shared_expert.down_proj.weight",
    "mlp/shared/share": "mlp.shared_expert_gate.weight",
}
NAMES = Names("model.layers.", _OUTSIDE_LAYERS, _IN_LAYER)
MIXTRAL = dataclasses.replace(
    NAMES,
    in_layer=_IN_LAYER
    | {
        "mlp/router": "block_sparse_moe.gate.weight",
        "mlp/experts/gate": "block_sparse_moe.experts.{expert}.w1.weight",
        "mlp/experts/up": "block_sparse_moe.experts.{expert}.w3.weight",
        "mlp/experts/down": "block_sparse_moe.experts.{expert}.w2.weight",
    },
)


def tensors_in(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors in a file by name. Raises UserError if the file is missing or damaged, or a dtype
    is unsupported.
    """
    library = _library()
    try:
        # safe_open says of any that it cannot open: no such file
        with reading(file), open(file, "rb") as content:
            head = content.read(8)
            # compares the header with the file's length
            with library.safe_open(file, framework="numpy"):
                pass
            length = int.from_bytes(head, "little")
            header = json.loads(content.read(length))
    except (library.SafetensorError, ValueError, RecursionError) as error:
        reason = error_text(error)[:200]
        raise UserError(f"{str(file)!r} is not a whole safetensors file: {reason}") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        kind = entry["dtype"]
        if kind not in _DTYPES:
            raise UserError(
                f"{str(file)!r}: {name} is stored as {kind} (allowed: {', '.join(_DTYPES)};"
                " quantized weights have to be dequantized first)"
            )
        dtype = _DTYPES[kind]
        shape = tuple(entry["shape"])
        offset = 8 + length + entry["data_offsets"][0]
        read = functools.partial(from_file, file, dtype, shape, offset=offset)
        found[name] = Stored(shape, dtype, read)
    return found


def write_tensors(file: pathlib.Path, pending: Mapping[str, Stored]) -> None:
    """Write all these tensors. Raises RunFailed where the disk does not take them."""
    library = _library()
    values = {name: np.ascontiguousarray(tensor.read()) for name, tensor in pending.items()}
    try:
        library.numpy.save_file(values, file, metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise RunFailed(f"cannot write {str(file)!r}: {error_text(error)[:200]}") from None


def _library():
    with needed("Hugging Face models need the safetensors package", extra="hf"):
        import safetensors.numpy
    return safetensors
