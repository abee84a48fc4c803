"""Safetensors files (https://huggingface.co/docs/safetensors), read and written one array at a
time.

The `safetensors` library only checks a file's header. It would write whole shards at once, and map
a file to read it: a mapped file that is truncated, or whose disk fails, ends the process with
SIGBUS.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from ladder_jax.errors import UserError, needed
from ladder_jax.pretrained.source import Stored, from_file

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


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


def tensors(file: pathlib.Path) -> dict[str, Tensor]:
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
        if entry["dtype"] not in DTYPES:
            raise UserError(
                f"{str(file)!r}: {name} is stored as {entry['dtype']} (allowed: {', '.join(DTYPES)};"
                " quantized weights have to be dequantized first)"
            )
        offset = 8 + length + entry["data_offsets"][0]
        by_name[name] = Tensor(file, tuple(entry["shape"]), DTYPES[entry["dtype"]], offset)
    return by_name


def write(file: pathlib.Path, pending: Mapping[str, Stored]) -> Iterator[str]:
    """Write the tensors in order. Yields each name after its values are written."""
    names = {dtype: name for name, dtype in DTYPES.items()}
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
