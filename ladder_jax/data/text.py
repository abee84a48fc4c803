"""Training text as bytes: of a file, a folder, or the source of Python's standard library."""

import dataclasses
import pathlib
import sysconfig

import numpy as np

from ladder_jax.config import DataConfig
from ladder_jax.data.tokenizer import BYTES, Tokenizer
from ladder_jax.errors import UserError

STDLIB = "stdlib"


@dataclasses.dataclass(frozen=True)
class Text:
    """content: the text's bytes, uint8 [n]. files: how many it is of. skipped: files that are not UTF-8 text.

    cut: whether `data.max_bytes` left something out.
    """

    content: np.ndarray
    files: int
    skipped: int
    cut: bool

    def summary(self, path: str) -> str:
        files = "1 file" if self.files == 1 else f"{self.files:,} files"
        line = f"data: {files} of {path}, {len(self.content):,} bytes of text"
        if self.skipped:
            line += f"; left out, as they are not UTF-8 text: {self.skipped:,}"
        return line + ("; the rest is left out by data.max_bytes" if self.cut else "")


def load(config: DataConfig) -> np.ndarray:
    """The text's bytes, uint8 [n], as in `read`."""
    return read(config).content


def read(config: DataConfig) -> Text:
    """The text, at most `data.max_bytes` bytes of it. Raises UserError if there are none.

    For a folder: all files that are UTF-8 text, in the order of their paths.
    """
    if config.path == STDLIB:
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts and "test" not in p.parts]
    else:
        root = pathlib.Path(config.path).expanduser()
        if not root.exists():
            raise UserError(f"data.path={config.path!r} does not exist (a text file, a folder, or {STDLIB!r})")
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    parts, size = [], 0
    for file in files:
        if size >= config.max_bytes:
            break
        part = _read(file, skip_binary=file != root)
        parts.append(part)
        size += len(part or b"")
    whole = b"\n".join(part for part in parts if part)
    text = whole[: config.max_bytes]
    if not text.strip():
        raise UserError(f"data.path={config.path!r} holds no text")
    skipped = parts.count(None)
    cut = len(text) < len(whole) or len(parts) < len(files)
    return Text(np.frombuffer(text, np.uint8), len(parts) - skipped, skipped, cut)


def _read(file: pathlib.Path, *, skip_binary: bool) -> bytes | None:
    """A file's bytes. skip_binary: for a file that is not UTF-8 text, return None rather than raise UserError."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}") from None
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        if skip_binary:
            return None
        raise UserError(f"data.path={str(file)!r} is not UTF-8 text") from None
    return content


def tokens(content: np.ndarray, *, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens of a text's bytes, [n]."""
    if tokenizer.name == BYTES:
        return content
    # `data.max_bytes` may have cut the last character.
    return np.array(tokenizer.encode(content.tobytes().decode("utf-8", errors="ignore")), np.int32)


def bigram_entropy(text: np.ndarray) -> float:
    """The entropy of a byte given the previous byte, in nats per byte: the best loss of a bigram model."""
    pairs = np.bincount(text[:-1].astype(np.int64) * 256 + text[1:], minlength=65536).reshape(256, 256)
    first = pairs.sum(axis=1, keepdims=True)
    joint = pairs / pairs.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        conditional = np.where(pairs > 0, np.log(pairs / first), 0.0)
    return float(-(joint * conditional).sum())
