"""The weights of a Hugging Face folder: safetensors files
(https://huggingface.co/docs/safetensors), read and written one array at a time, and which of their
tensors hold which of our arrays.

The `safetensors` library only checks a file's header. It would write whole shards at once, and map
a file to read it: a mapped file that is truncated, or whose disk fails, ends the process with
SIGBUS.

Both sides use rotary embedding in rotate-half form, so queries and keys need no permutation.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.errors import UserError, needed
from ladder_jax.pretrained import source
from ladder_jax.pretrained.source import Key, Source, Stored, from_file

_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OUTSIDE_LAYERS = {
    "embedding/table": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/table": "lm_head.weight",
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
_MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What Mixtral calls experts and their router."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file. `read` returns its values; raises UserError if the file cannot be read or
    was cut short.
    """

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def read(self) -> np.ndarray:
        return from_file(self.file, self.dtype, math.prod(self.shape), offset=self.offset).reshape(
            self.shape
        )


def tensors_in(file: pathlib.Path) -> dict[str, Tensor]:
    """The tensors in a file by name. Raises UserError if the file is missing or damaged, or a dtype
    is unsupported.
    """
    library = _library()
    try:
        # compares the header with the file's length
        with library.safe_open(file, framework="numpy"):
            pass
        with open(file, "rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
    except FileNotFoundError:
        raise UserError(f"there is no file {str(file)!r}") from None
    except (library.SafetensorError, OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{str(file)!r} is not a whole safetensors file: {reason}") from None
    header.pop("__metadata__", None)
    by_name = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"{str(file)!r}: {name} is stored as {entry['dtype']} (allowed: {', '.join(_DTYPES)};"
                " quantized weights have to be dequantized first)"
            )
        offset = 8 + length + entry["data_offsets"][0]
        by_name[name] = Tensor(file, tuple(entry["shape"]), _DTYPES[entry["dtype"]], offset)
    return by_name


def write_tensors(file: pathlib.Path, pending: Mapping[str, Stored]) -> Iterator[str]:
    """Write the tensors in order. Yields each name after its values are written."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in pending.items():
        extent = [offset, offset := offset + tensor.nbytes]
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": extent,
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # values begin at a multiple of 8
    with open(file, "wb") as content:
        content.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in pending.items():
            content.write(_bytes(tensor.read()))
            yield name


def shards(pending: Mapping[str, Stored], *, limit: int) -> Iterator[dict[str, Stored]]:
    """Split the tensors, in order, into shards of at most `limit` bytes, but at least one
    tensor.
    """
    shard, size = {}, 0
    for name, tensor in pending.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit are equal."""
    return (a.shape, a.dtype) == (b.shape, b.dtype) and _bytes(a) == _bytes(b)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _library():
    with needed("Hugging Face models need the safetensors package", extra="hf"):
        import safetensors
    return safetensors


def _forms(
    model: ModelConfig, *, mixtral: bool
) -> Iterator[tuple[Key, tuple[int, ...], str, list[str]]]:
    """Each array's key and shape, the dimensions of a tensor of it, and its tensors' names: of
    experts one each.
    """
    dims = source.dims(model)
    for key, ours in source.expected_shapes(model).items():
        each = dims[key.name].removeprefix("E")
        if key.layer is None:
            yield key, ours, each, [_OUTSIDE_LAYERS[key.name]]
            continue
        theirs = _IN_LAYER[key.name.partition("/")[2]]
        if mixtral and ("experts" in theirs or "mlp.gate." in theirs):
            for old, new in _MIXTRAL.items():
                theirs = theirs.replace(old, new)
        theirs = f"model.layers.{key.layers(model)[key.layer]}.{theirs}"
        count = ours[0] if dims[key.name].startswith("E") else 1
        yield key, ours, each, [theirs.format(expert=expert) for expert in range(count)]


def _torch_shape(key: Key, dims: str, ours: tuple[int, ...]) -> tuple[int, ...]:
    """Of one tensor, [out, in]."""
    shape = source.torch_shape(dims, ours[-len(dims) :])
    return (1, *shape) if key.name.endswith("/share") else shape


def arrays(
    folder: pathlib.Path, model: ModelConfig, found: Mapping[str, Tensor]
) -> dict[Key, Stored]:
    """All arrays of the model. Raises UserError if a tensor is missing, extra, or of another
    shape.
    """
    source.check_layers(model, tensors=len(found), path=str(folder))
    found = _unfused(found)
    mixtral = any(".block_sparse_moe." in name for name in found)
    arrays, used = {}, set()

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        used.add(name)
        if name not in found:
            raise UserError(f"{str(folder)!r} holds no {name}")
        if found[name].shape != shape:
            raise UserError(
                f"{str(found[name].file)!r}: {name} is {found[name].shape}, but {shape} by its config.json"
            )
        return found[name]

    for key, ours, dims, names in _forms(model, mixtral=mixtral):
        parts = [take(name, _torch_shape(key, dims, ours)) for name in names]
        dtype = functools.reduce(jnp.promote_types, {part.dtype for part in parts})
        arrays[key] = Stored(
            ours, np.dtype(dtype), functools.partial(_read, parts, dims, ours, dtype)
        )
    _check_rest(folder, model, found, used)
    return arrays


def _read(parts: list[Tensor], dims: str, ours: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    matrices = [
        source.from_torch(part.read(), dims=dims, ours=ours[-len(dims) :]) for part in parts
    ]
    return matrices[0] if len(dims) == len(ours) else np.stack(matrices).astype(dtype, copy=False)


def _unfused(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With each expert's matrices apart, where one tensor holds all of them, as transformers 5 has
    them in memory:

    gates and ups [E, 2 M, D], and downs [E, D, M]. Each matrix is a part of the file.
    """
    apart = {}
    for name, tensor in found.items():
        stem, _, last = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last)
        if parts is None or len(tensor.shape) != 3:
            apart[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        shape = (rows // len(parts), columns)
        size = math.prod(shape) * tensor.dtype.itemsize
        for number, (expert, part) in enumerate(itertools.product(range(experts), parts)):
            offset = tensor.offset + number * size
            apart[f"{stem}.{expert}.{part}.weight"] = dataclasses.replace(
                tensor, shape=shape, offset=offset
            )
    return apart


def _check_rest(
    folder: pathlib.Path, model: ModelConfig, found: Mapping[str, Tensor], used: set[str]
) -> None:
    """Raises UserError for tensors that are not the model's. Some files contain the table of tied
    embeddings twice.
    """
    # of old files
    extra = sorted(
        name for name in found.keys() - used if not name.endswith(".rotary_emb.inv_freq")
    )
    head, table = (_OUTSIDE_LAYERS[name] for name in ("head/table", "embedding/table"))
    if model.tie_embeddings and head in extra:
        extra.remove(head)
        if not same(found[head].read(), found[table].read()):
            raise UserError(
                f"{str(found[head].file)!r}: {head} differs from the embedding, though tie_word_embeddings is true"
            )
    if extra:
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise UserError(
            f"{str(folder)!r} holds {extra[0]}{more}, not in the model of its config.json"
        )


def pending(exported: Source, *, mixtral: bool) -> dict[str, Stored]:
    """The tensors to write, by their names."""
    # its experts come in turn
    newest = functools.lru_cache(maxsize=1)(lambda key: exported.arrays[key].read())

    def values(key: Key, dims: str, theirs: tuple[int, ...], expert: int) -> np.ndarray:
        array = newest(key)
        one = array[expert] if array.ndim > len(dims) else array
        return source.to_torch(one, dims=dims, theirs=theirs)

    found = {}
    for key, ours, dims, names in _forms(exported.model, mixtral=mixtral):
        theirs = _torch_shape(key, dims, ours)
        for expert, name in enumerate(names):
            read = functools.partial(values, key, dims, theirs, expert)
            found[name] = Stored(theirs, exported.arrays[key].dtype, read)
    return found
