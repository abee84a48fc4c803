"""What serving asks of a tokenizer, and the one of models of bytes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ladder_jax.data import text
from ladder_jax.errors import UserError


class Tokenizer(Protocol):
    """stop_ids: tokens that end a text; has_chat: whether there is a chat template."""

    stop_ids: tuple[int, ...]
    has_chat: bool

    def encode(self, text: str) -> list[int]: ...

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        """Those of a sequence are its tokens' bytes, joined."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt for the next answer. Raises UserError where the template refuses the messages."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Tokens 0 to 255 are a text's UTF-8 bytes."""

    stop_ids: tuple[int, ...] = ()
    has_chat: bool = False

    def encode(self, prompt: str) -> list[int]:
        return text.encode(prompt)

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        return text.to_bytes(tokens)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise UserError("a model of bytes has no chat template")
