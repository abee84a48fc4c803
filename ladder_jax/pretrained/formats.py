"""Open a pretrained model in any supported format."""

import os
import pathlib

from ladder_jax.errors import UserError
from ladder_jax.pretrained import gguf, saved
from ladder_jax.pretrained.huggingface import read
from ladder_jax.pretrained.source import Source


def open_source(path: str | os.PathLike) -> Source:
    """The model at `path`: a Hugging Face folder, a GGUF file, or a checkpoint or run of ladder_jax.

    Reads only headers. Raises UserError for other formats, damaged files, and models that cannot be represented.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise UserError(f"there is no model at {str(path)!r}")
    if (path / read.CONFIG).is_file() and not (path / "checkpoints").is_dir():  # a run's folder has both
        return read.read(path)
    if path.is_dir():
        return saved.read(path)
    return gguf.read(path)
