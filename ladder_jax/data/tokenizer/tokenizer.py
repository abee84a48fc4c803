"""Tokenizers: what one is, the one that needs no files (bytes), and how one is loaded and kept in a run's folder."""

import dataclasses
import datetime
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ladder_jax.data.tokenizer.huggingface import FILES, HuggingFace
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, absolute, is_remote

BYTES = "bytes"
FOLDER = "tokenizer"
"""The tokenizer's folder in a run's folder."""


class Tokenizer(Protocol):
    """Text to tokens and back.

    name: "bytes", or a digest that tells it from others; checkpoints and token stores hold it.
    vocab_size: all tokens are below it.
    stop_ids: tokens that end a text, the one that ends a document first; none for bytes.
    begin_id: the token that begins a text, if there is one.
    has_chat: whether there is a chat template.
    """

    name: str
    vocab_size: int
    stop_ids: tuple[int, ...]
    begin_id: int | None
    has_chat: bool

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer puts around a text by itself, such as a beginning-of-sequence token."""

    def encode_bare(self, text: str) -> list[int]:
        """Without what `encode` puts around a text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Without special tokens; what is not UTF-8 becomes replacement characters."""

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        """Those of a sequence are its tokens' bytes, joined; special and unknown tokens give nothing."""

    def offsets(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The text's tokens, and of each the characters begin..end-1 that it stands for.

        special: with what the tokenizer puts around a text by itself, which stands for none.
        """

    def render(
        self, messages: Sequence[Mapping[str, str]], *, prompt: bool, now: datetime.datetime | None = None
    ) -> str:
        """A conversation as text, by the chat template. prompt: up to where the assistant's next answer begins.

        now: the time, for a template that asks for it; None: the present.
        Raises UserError where there is no template, or where it refuses the messages.
        """

    def chat(self, messages: Sequence[Mapping[str, str]], *, now: datetime.datetime | None = None) -> list[int]:
        """A prompt for the next answer, by the chat template: `[{"role": "user", "content": "Hello"}]`.

        now: as in `render`.
        Raises UserError where there is no template, or where it refuses the messages.
        """


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Tokens 0 to 255 are a text's UTF-8 bytes."""

    name: str = BYTES
    vocab_size: int = 256
    stop_ids: tuple[int, ...] = ()
    begin_id: int | None = None
    has_chat: bool = False

    def encode(self, text: str) -> list[int]:
        """Bytes of a command line that are not UTF-8 stay what they were."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def encode_bare(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self.to_bytes(tokens).decode("utf-8", errors="replace")

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        return bytes(int(token) for token in tokens if token < 256)

    def offsets(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        try:
            content = [character.encode("utf-8", errors="surrogateescape") for character in text]
        except UnicodeEncodeError:
            raise UserError("the text holds half of a surrogate pair, which is no character") from None
        places = [(index, index + 1) for index, part in enumerate(content) for _ in part]
        return list(b"".join(content)), places

    def render(
        self, messages: Sequence[Mapping[str, str]], *, prompt: bool, now: datetime.datetime | None = None
    ) -> str:
        raise UserError("a model of bytes has no chat template; it learns from 'prompt' and 'completion'")

    def chat(self, messages: Sequence[Mapping[str, str]], *, now: datetime.datetime | None = None) -> list[int]:
        raise UserError("a model of bytes has no chat template; ask it with --prompt")


def load(path: str | os.PathLike | None) -> Tokenizer:
    """Bytes for None and "bytes", else the tokenizer in that folder. Raises UserError for what is none."""
    if path is None or path == BYTES:
        return Bytes()
    folder = absolute(path) if is_remote(path) else pathlib.Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no tokenizer at {str(path)!r} (allowed: {BYTES!r}, or a folder with tokenizer.json)")
    return HuggingFace(folder)


def save(tokenizer: Tokenizer, folder: AnyPath) -> None:
    """Copy the tokenizer's files to `folder`, all or none; bytes have none.

    Raises UserError where another tokenizer lies there.
    """
    if not isinstance(tokenizer, HuggingFace):
        return
    if (folder / FILES[0]).exists() if is_remote(folder) else folder.exists():
        if load(folder).name != tokenizer.name:
            raise UserError(f"{str(folder)!r} holds another tokenizer than {str(tokenizer.folder)!r}")
        return
    files = [name for name in FILES if (tokenizer.folder / name).is_file()]
    if is_remote(folder):
        for name in reversed(files):  # the main file last: without it there is no tokenizer
            (folder / name).write_bytes((tokenizer.folder / name).read_bytes())
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
    try:
        for name in files:
            (partial / name).write_bytes((tokenizer.folder / name).read_bytes())
        os.chmod(partial, 0o755)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, path: str | None = None) -> None:
    """Raises UserError where the model has fewer tokens than the tokenizer. More is fine: tables are often padded.

    path: of the files that both are from; None where a configuration says vocab_size.
    """
    if vocab_size < tokenizer.vocab_size:
        where = "" if path is None else f"{path!r}: "
        raise UserError(
            f"{where}model.vocab_size={vocab_size} is too small for {tokenizer.name} (at least {tokenizer.vocab_size})"
        )
