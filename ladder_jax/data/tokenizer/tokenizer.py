"""What a tokenizer is, and the one that needs no files: bytes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ladder_jax.errors import UserError

BYTES = "bytes"


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

    def render(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        """A conversation as text, by the chat template. prompt: up to where the assistant's next answer begins.

        Raises UserError where there is no template, or where it refuses the messages.
        """

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A prompt for the next answer, by the chat template: `[{"role": "user", "content": "Hello"}]`.

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
        content = [character.encode("utf-8", errors="surrogateescape") for character in text]
        places = [(index, index + 1) for index, part in enumerate(content) for _ in part]
        return list(b"".join(content)), places

    def render(self, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        raise UserError("a model of bytes has no chat template; it learns from 'prompt' and 'completion'")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise UserError("a model of bytes has no chat template; ask it with --prompt")
