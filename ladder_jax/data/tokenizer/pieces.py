"""The exact bytes of each token of a Hugging Face tokenizer, from the `decoder` in its tokenizer.json.

`tokenizers` decodes whole sequences to text. Text that is streamed, or cut at any token, needs the bytes
of one token alone: a character may be spread over several.
"""

import re
from collections.abc import Callable

from ladder_jax.errors import UserError

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
KNOWN = ("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip")

Step = Callable[[str | bytes], str | bytes]


class Pieces:
    """`Pieces(decoder)(piece)`: a token's bytes, from how it is written in the vocabulary.

    drops_first_space: whether a whole text begins with a space that the tokenizer has put there.
    Raises UserError for a decoder whose tokens have no bytes of their own.
    """

    def __init__(self, decoder: dict | None):
        self.drops_first_space = False
        self._steps: list[Step] = []
        for part in _flat(decoder):
            self._add(part)

    def __call__(self, piece: str) -> bytes:
        for step in self._steps:
            piece = step(piece) if isinstance(piece, str) else piece
        return piece.encode() if isinstance(piece, str) else piece

    def _add(self, part: dict) -> None:
        kind = part.get("type")
        if kind == "ByteLevel":
            self._steps.append(_byte_level)
        elif kind == "ByteFallback":
            self._steps.append(_byte_fallback)
        elif kind == "Metaspace":
            self._replace(part["replacement"], " ")
            self.drops_first_space |= part.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in part["pattern"]:
            self._replace(part["pattern"]["String"], part["content"])
        elif kind == "Strip" and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            self.drops_first_space = True
        elif kind != "Fuse":
            raise UserError(
                f"the tokenizer's decoder {kind!r} is not supported, or not as it is set"
                f" (byte-level and sentencepiece-style tokenizers are: {', '.join(KNOWN)})"
            )

    def _replace(self, old: str, new: str) -> None:
        self._steps.append(lambda piece: piece.replace(old, new))


def _flat(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return [{"type": None}]
    if decoder.get("type") == "Sequence":
        return [part for below in decoder["decoders"] for part in _flat(below)]
    return [decoder]


def _byte_fallback(piece: str) -> str | bytes:
    found = BYTE.fullmatch(piece)
    return bytes([int(found[1], 16)]) if found else piece


def _byte_level(piece: str) -> str | bytes:
    """Byte-level BPE writes each byte as a character; a piece with any other character stands for itself."""
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:
        return piece


def _characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own bytes, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _characters()
