"""A GGUF file: its metadata, and its tensors, which are read lazily.

Tensors are read into buffers, in blocks of rows. The file is not mapped: its pages would stay in memory.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.pretrained.gguf import head, kinds

PLAIN = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The types that are kept. All others are quantised, and become float32, which holds their values exactly."""

BLOCK = 1 << 24  # bytes of quantised rows that are read at a time: with 4 bits, 128 MiB in float32


@dataclasses.dataclass(frozen=True)
class Tensor:
    """shape: [out, in], as Hugging Face's matrices. kind: the type, such as "Q4_1". offset, size: in bytes."""

    path: str
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def dtype(self) -> np.dtype:
        return PLAIN.get(self.kind, np.dtype("float32"))

    def read(self) -> np.ndarray:
        """The values, with this shape and dtype. Raises UserError if the file cannot be read or is cut off."""
        try:
            if self.kind in PLAIN:
                return self._bytes(0, self.size).view(self.dtype).reshape(self.shape)
            return self._dequantised()
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.name} of {self.path!r}: {error}") from None

    def _bytes(self, start: int, size: int) -> np.ndarray:
        content = np.fromfile(self.path, np.uint8, size, offset=self.offset + start)
        if len(content) != size:
            raise ValueError(f"it ends after {self.offset + start + len(content):,} bytes")
        return content

    def _dequantised(self) -> np.ndarray:
        rows = int(np.prod(self.shape[:-1]))
        out, width = np.empty((rows, self.shape[-1]), np.float32), self.size // rows
        step = max(1, BLOCK // width)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            packed = self._bytes(start * width, count * width).reshape(count, width)
            out[start : start + count] = _dequantise(packed, self.kind)
        return out.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class File:
    """fields: the metadata by name, each a plain value or a list. tensors: by name."""

    path: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def open_file(path: pathlib.Path) -> File:
    """Reads the header only. Raises UserError if it is not a GGUF file, is cut off, or has unsupported types."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(
                    f"{str(path)!r} is no pretrained model (allowed: a Hugging Face folder, a GGUF file, a checkpoint)"
                )
        gguf = _package()
        head.check(path)
        reader = gguf.GGUFReader(path)
    except OSError as error:
        raise UserError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # the reader has no error class for damaged files
        raise UserError(f"{str(path)!r} is damaged or incomplete: {_line(error)}") from None
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:
        raise UserError(f"{str(path)!r} is damaged: a setting cannot be read ({_line(error)})") from None
    kinds.check(fields, path=str(path))
    return File(str(path), fields, {tensor.name: _tensor(path, tensor) for tensor in reader.tensors})


def _tensor(path: pathlib.Path, stored: Any) -> Tensor:
    kind, shape = stored.tensor_type.name, tuple(int(size) for size in reversed(stored.shape))
    if kind not in PLAIN and kind not in _quantised():
        allowed = ", ".join((*PLAIN, *_quantised()))
        raise UserError(f"{str(path)!r}: {stored.name} is of type {kind}, which is not supported (allowed: {allowed})")
    if not shape or min(shape) < 1:
        raise UserError(f"{str(path)!r}: {stored.name} has no values, its shape is {shape}")
    return Tensor(str(path), stored.name, kind, shape, int(stored.data_offset), int(stored.n_bytes))


@functools.cache
def _quantised() -> tuple[str, ...]:
    """The types that the package can dequantise."""
    from gguf import GGMLQuantizationType, quants

    return tuple(kind.name for kind in GGMLQuantizationType if hasattr(quants, kind.name) and kind.name not in PLAIN)


def _dequantise(packed: np.ndarray, kind: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(packed, GGMLQuantizationType[kind])


def _package():
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the package gguf: pip install 'ladder-jax[hf]'") from None
    return gguf


def _line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
