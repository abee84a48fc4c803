"""Safetensors files (https://huggingface.co/docs/safetensors): read without loading, written one array at a time.

The `safetensors` library checks a file; it would read and write whole shards, so the bytes are mapped and written here.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import ml_dtypes
import numpy as np

from ladder_jax.errors import UserError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_BLOCK = 2**24  # bytes


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file; `read` maps it: nothing is loaded but what is looked at."""

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def read(self) -> np.ndarray:
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        try:
            return np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {str(self.file)!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class Pending:
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: np.dtype
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def tensors(file: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises UserError where it is missing, truncated, damaged, or not of floats."""
    library = _library()
    try:
        with library.safe_open(file, framework="numpy"):  # compares the header with the file's length
            pass
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
    except FileNotFoundError:
        raise UserError(f"there is no file {str(file)!r}") from None
    except (library.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{str(file)!r} is not a whole safetensors file: {_line(error)}") from None
    header.pop("__metadata__", None)
    found = {}
    for name, told in header.items():
        if told["dtype"] not in DTYPES:
            raise UserError(
                f"{str(file)!r}: {name} is stored as {told['dtype']} (allowed: {', '.join(DTYPES)};"
                " quantized weights have to be dequantized first)"
            )
        found[name] = Tensor(file, tuple(told["shape"]), DTYPES[told["dtype"]], 8 + length + told["data_offsets"][0])
    return found


def write(file: pathlib.Path, pending: Mapping[str, Pending]) -> Iterator[str]:
    """Write the tensors in their order; yields each name once its values are in the file."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in pending.items():
        extent = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": extent}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % 8)  # values begin at a multiple of 8
    with open(file, "wb") as opened:
        opened.write(len(described).to_bytes(8, "little") + described)
        for name, tensor in pending.items():
            values = np.ascontiguousarray(tensor.values(), tensor.dtype)
            if values.shape != tensor.shape:
                raise ValueError(f"{name} is {values.shape}, not {tensor.shape}")
            opened.write(values.reshape(-1).view(np.uint8).data)
            yield name


def shards(pending: Mapping[str, Pending], *, limit: int) -> Iterator[dict[str, Pending]]:
    """In order, as many together as stay within `limit` bytes, and at least one."""
    shard, size = {}, 0
    for name, tensor in pending.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name], size = tensor, size + tensor.nbytes
    yield shard


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit agree; compared in blocks, as comparing takes memory."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return all(np.array_equal(a[at : at + _BLOCK], b[at : at + _BLOCK]) for at in range(0, a.size, _BLOCK))


def check_dtypes(dtypes: Iterable[np.dtype]) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES.values():
            raise UserError(f"safetensors are written of {', '.join(map(str, DTYPES.values()))}, not of {dtype}")


def _library():
    try:
        import safetensors
    except ImportError:
        raise UserError("Hugging Face models need the safetensors package: pip install 'ladder-jax[hf]'") from None
    return safetensors


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
