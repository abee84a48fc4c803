"""A tokenizer by its path, its copy in a run's folder, and whether it fits a model."""

import os
import pathlib
import shutil
import tempfile

from ladder_jax.data.tokenizer.huggingface import FILES, HuggingFace
from ladder_jax.data.tokenizer.tokenizer import BYTES, Bytes, Tokenizer
from ladder_jax.errors import UserError

FOLDER = "tokenizer"
"""The tokenizer's folder in a run's folder."""


def load(path: str | os.PathLike | None) -> Tokenizer:
    """Bytes for None and "bytes", else the tokenizer in that folder. Raises UserError for what is none."""
    if path is None or path == BYTES:
        return Bytes()
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no tokenizer at {str(path)!r} (allowed: {BYTES!r}, or a folder with tokenizer.json)")
    return HuggingFace(folder)


def save(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Copy the tokenizer's files to `folder`, all or none; bytes have none.

    Raises UserError where another tokenizer lies there.
    """
    if not isinstance(tokenizer, HuggingFace):
        return
    if folder.exists():
        if load(folder).name != tokenizer.name:
            raise UserError(f"{str(folder)!r} holds another tokenizer than {str(tokenizer.folder)!r}")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    try:
        for name in FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, partial / name)
        os.chmod(partial, 0o755)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int) -> None:
    """Raises UserError where the model has fewer tokens than the tokenizer. More is fine: tables are often padded."""
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size={vocab_size} is too small for {tokenizer.name} (at least {tokenizer.vocab_size})"
        )
