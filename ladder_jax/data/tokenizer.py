"""Text to tokens and back: bytes, or any Hugging Face tokenizer with its chat template.

The library `tokenizers` decodes whole sequences to text. Text that is streamed, or cut at any
token, needs the exact bytes of one token alone, as a character may be spread over several: they
follow from the `decoder` in tokenizer.json.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ladder_jax import files
from ladder_jax.data.chat_template import ChatTemplate
from ladder_jax.errors import UserError, refused
from ladder_jax.files import AnyPath, expanded, leads_out, reading

BYTES = "bytes"
FOLDER = "tokenizer"
"""The tokenizer's folder in a run's folder."""
MAIN = "tokenizer.json"
GENERATION = "generation_config.json"
FILES = (
    MAIN,
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION,
    "chat_template.jinja",
)
"""What is read of a tokenizer's folder; only the first must be there."""
CARRIED = (
    "added_tokens.json",
    "tokenizer.model",  # SentencePiece's own, which tokenizer.json repeats
    "vocab.json",
    "merges.txt",
)
"""What is copied beside FILES, for other programs: regular files that lie in the same folder."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Messages = Sequence[Mapping[str, str]]
Offsets = tuple[list[int], list[tuple[int, int]]]
Step = Callable[[str], str | bytes]


class Tokenizer:
    """Text to tokens and back.

    name: "bytes", or a digest that tells it from others; checkpoints and token stores hold it.
    where: its folder, for messages.
    vocab_size: all tokens are below it.
    stop_ids: tokens that end a text, the one that ends a document first; none for bytes.
    bos_token_id: the token that begins a text, if there is one.
    special_ids: special tokens by their texts.
    files: the contents of its FILES and CARRIED, by name; none for bytes.
    """

    name: str
    where: str
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    special_ids: Mapping[str, int] = types.MappingProxyType({})
    files: Mapping[str, bytes] = types.MappingProxyType({})
    _chat: ChatTemplate | None = None
    _own_space = b""  # which it puts at the beginning of a text

    @property
    def has_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._chat is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """special: with what the tokenizer puts around a text by itself, such as a
        beginning-of-sequence token.
        """

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        """Those of a sequence are its tokens' bytes, joined; special and unknown tokens give
        nothing.
        """

    def offsets(self, text: str, *, special: bool) -> Offsets:
        """The text's tokens, and of each the characters begin..end-1 that it stands for.

        special: with what the tokenizer puts around a text by itself, which stands for none.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """Without special tokens; what is not UTF-8 becomes replacement characters."""
        content = self.to_bytes(tokens).removeprefix(self._own_space)
        return content.decode("utf-8", errors="replace")

    def render(
        self, messages: Messages, *, prompt: bool, now: datetime.datetime | None = None
    ) -> str:
        """A conversation as text, by the chat template. prompt: up to where the assistant's next
        answer begins.

        now: the time, for a template that asks for it; None: the present.
        Raises UserError where there is no template, or where it refuses the messages.
        """
        if self._chat is None:
            raise UserError(
                f"the tokenizer {self.where!r} has no chat template; ask the model with --prompt, and train it on"
                " 'prompt' and 'completion'"
            )
        return self._chat(messages, prompt=prompt, now=now)

    def chat(self, messages: Messages, *, now: datetime.datetime | None = None) -> list[int]:
        """A prompt for the next answer, by the chat template:
        `[{"role": "user", "content": "Hello"}]`.

        now: as in `render`.
        Raises UserError where there is no template, or where it refuses the messages.
        """
        # The template writes the special tokens itself, the first one too.
        text = self.render(messages, prompt=True, now=now)
        return self.encode(text, special=False)


@dataclasses.dataclass(frozen=True)
class Bytes(Tokenizer):
    """Tokens 0 to 255 are a text's UTF-8 bytes."""

    name = where = BYTES
    vocab_size = 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Bytes of a command line that are not UTF-8 stay what they were."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        return bytes(int(token) for token in tokens if token < 256)

    def offsets(self, text: str, *, special: bool) -> Offsets:
        tokens = []
        places = []
        for index, character in enumerate(text):
            found = self.encode(character)
            place = (index, index + 1)
            tokens += found
            places += [place] * len(found)
        return tokens, places


def load(path: str | os.PathLike | None) -> Tokenizer:
    """Bytes for None and "bytes", else the tokenizer in that folder. Raises UserError for what is
    none.
    """
    if path is None or path == BYTES:
        return Bytes()
    folder = expanded(path)
    if not folder.is_dir():
        raise UserError(
            f"there is no tokenizer at {str(path)!r} (allowed: {BYTES!r}, or a folder with {MAIN})"
        )
    return HuggingFace(_read(folder), where=str(folder))


def save(tokenizer: Tokenizer, folder: AnyPath) -> None:
    """Copy the tokenizer's files to `folder`, the main one last, without which there is no
    tokenizer; bytes have none.

    Raises UserError where another tokenizer lies there.
    """
    if (folder / MAIN).exists():
        if load(folder).name != tokenizer.name:
            raise UserError(
                f"{str(folder)!r} holds another tokenizer than {tokenizer.name}: remove it, or choose another folder"
            )
        return
    if not tokenizer.files:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(tokenizer.files, key=lambda name: name == MAIN):
        files.write(folder / name, [tokenizer.files[name]])


def check_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, path: str | None = None) -> None:
    """Raises UserError where the model has fewer tokens than the tokenizer. More is fine: tables
    are often padded.

    path: of the files that both are from; None where a configuration says vocab_size.
    """
    if vocab_size < tokenizer.vocab_size:
        where = "" if path is None else f"{path!r}: "
        raise UserError(
            f"{where}model.vocab_size={vocab_size} is too small for {tokenizer.name} (at least {tokenizer.vocab_size})"
        )


def alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether tokens stand for the same in both: every piece that both have has one number, as in
    two formats of one tokenizer, which may differ in unused tokens.
    """
    if not (isinstance(one, HuggingFace) and isinstance(other, HuggingFace)):
        return one.name == other.name
    ours = one.numbers()
    theirs = other.numbers()
    return all(theirs[piece] == ours[piece] for piece in ours.keys() & theirs.keys())


class HuggingFace(Tokenizer):
    """See Tokenizer. Raises UserError for files that are missing, damaged or of an unsupported
    kind.

    contents: its `files`.
    """

    def __init__(self, contents: Mapping[str, bytes], *, where: str):
        import tokenizers

        self.files = contents
        self.where = where
        content = self._text(MAIN, None)
        if content is None:
            raise UserError(
                f"{where!r} holds no {MAIN}: a tokenizer is a folder with one"
                " (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
            )
        with refused(f"{self._file(MAIN)!r} is not a tokenizer"):
            tokenizer = tokenizers.Tokenizer.from_str(content)
            tokenizer.no_truncation()
            tokenizer.no_padding()
            model = tokenizer.model
            # BPE's, for training: it draws the merges at random
            if hasattr(model, "dropout"):
                model.dropout = None
            described = json.loads(content)
            self._tokenizer = tokenizer
            self.vocab_size = 1 + max(self.numbers().values())
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = {one.content: token for token, one in added.items() if one.special}
        digest = hashlib.sha256(contents[MAIN]).hexdigest()
        self.name = f"tokenizer-{digest[:16]}"
        self._steps, self._own_space = _steps(described.get("decoder"))
        config = self._object("tokenizer_config.json")
        mapped = self._object("special_tokens_map.json")
        # older files, whose tokenizer_config.json may hold what the tokens were before a fine-tuning
        older = "added_tokens_decoder" not in config
        config = config | mapped if older else mapped | config
        self._special = _special_tokens(config)
        self.stop_ids = self._stop_ids()
        self.bos_token_id = self._token_id("bos_token")
        source = self._text("chat_template.jinja", _template(config))
        if source is not None:
            self._chat = ChatTemplate(source, special=self._special)
        special = tuple(sorted(self._special.items()))
        self._contents = (self.name, source, self.stop_ids, special)

    def __eq__(self, other: object) -> bool:
        """Whether both do the same: models that hold copies of one tokenizer are one program to
        Flax.
        """
        return isinstance(other, HuggingFace) and self._contents == other._contents

    def __hash__(self) -> int:
        return hash(self._contents)

    def __deepcopy__(self, memo: dict) -> "HuggingFace":
        return self  # nothing changes it, and a chat template cannot be copied

    def __repr__(self) -> str:
        return (
            f"HuggingFace({self.where!r}, vocab_size={self.vocab_size}, has_chat={self.has_chat})"
        )

    def numbers(self) -> dict[str, int]:
        """All tokens' numbers, by how the vocabulary writes them."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        with self._encoding(text):
            # Fast: without the offsets of tokens in the text, a third of the time.
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return found.ids

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        table = self._bytes
        return b"".join(table.get(int(token), b"") for token in tokens)

    def offsets(self, text: str, *, special: bool) -> Offsets:
        with self._encoding(text):
            found = self._tokenizer.encode(text, add_special_tokens=special)
        return found.ids, found.offsets

    @contextlib.contextmanager
    def _encoding(self, text: str) -> Iterator[None]:
        with refused(f"the tokenizer in {self.where!r} cannot encode this text"):
            text.encode()  # half of a surrogate pair is no character
            yield

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Each token's bytes. Special tokens are not among them."""
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        written = {index: piece for piece, index in vocabulary.items()}
        for index, token in added.items():
            if token.special:
                written.pop(index, None)
            else:
                written[index] = token.content
        return {index: _piece_bytes(piece, self._steps) for index, piece in written.items()}

    def _file(self, name: str) -> str:
        return os.path.join(self.where, name)

    def _text(self, name: str, default: str | None) -> str | None:
        if name not in self.files:
            return default
        try:
            return self.files[name].decode()
        except UnicodeDecodeError:
            raise UserError(f"{self._file(name)!r} is not UTF-8 text") from None

    def _object(self, name: str) -> dict:
        return json_object(self._text(name, "{}"), where=self._file(name))

    def _token_id(self, name: str) -> int | None:
        if (token := self._special.get(name)) is None:
            return None
        with self._encoding(token):
            return self._tokenizer.token_to_id(token)

    def _stop_ids(self) -> tuple[int, ...]:
        more = self._object(GENERATION).get("eos_token_id")
        several = more if isinstance(more, list) else [more]
        found = [self._token_id("eos_token"), *several]
        # -1 stands for none
        is_token = lambda token: type(token) is int and 0 <= token < self.vocab_size
        return tuple(dict.fromkeys(filter(is_token, found)))


def _read(folder: AnyPath) -> dict[str, bytes]:
    """The contents of those of FILES and CARRIED that are there."""
    found = {}
    carried = [name for name in CARRIED if (folder / name).is_file()]
    for name in (*FILES, *(name for name in carried if not leads_out(folder / name))):
        with reading(folder / name), contextlib.suppress(FileNotFoundError):
            found[name] = (folder / name).read_bytes()
    return found


def json_object(content: bytes | str, *, where: str | AnyPath) -> dict[str, Any]:
    """The JSON object in a file's `content`. Raises UserError, which names the file `where`, for
    something else.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(where)!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{str(where)!r} must hold a JSON object")
    return found


def _special_tokens(config: dict) -> dict[str, str]:
    """`bos_token` and the like; a token is written as text, or as an object with its `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _template(config: dict) -> str | None:
    """That of a configuration; of several the one called default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _steps(decoder: dict | None) -> tuple[list[Step], bytes]:
    """How a token, as it is written in the vocabulary, becomes its bytes; and the space that the
    tokenizer puts at the beginning of a whole text, if it does. Raises UserError for a decoder
    whose tokens have no bytes of their own.
    """
    steps = []
    own_space = b""
    for part in _flat(decoder):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(_byte_level)
            case {"type": "ByteFallback"}:
                steps.append(_byte_fallback)
            case {"type": "Metaspace", "replacement": space}:
                steps.append(operator.methodcaller("replace", space, " "))
                if part.get("prepend_scheme", "always") != "never":
                    own_space = b" "
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                steps.append(operator.methodcaller("replace", old, new))
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                own_space = b" "
            case {"type": "Fuse"}:
                pass
            case _:
                raise UserError(
                    f"the tokenizer's decoder {part.get('type')!r} is not supported, or not as it is set (byte-level"
                    " and sentencepiece-style tokenizers are: ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip)"
                )
    return steps, own_space


def _piece_bytes(piece: str, steps: Sequence[Step]) -> bytes:
    for step in steps:
        piece = step(piece)
        if isinstance(piece, bytes):
            return piece
    return piece.encode()


def _flat(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return [{"type": None}]
    if decoder.get("type") == "Sequence":
        return [part for below in decoder["decoders"] for part in _flat(below)]
    return [decoder]


def _byte_fallback(piece: str) -> str | bytes:
    found = BYTE.fullmatch(piece)
    return bytes.fromhex(found[1]) if found else piece


def _byte_level(piece: str) -> str | bytes:
    """Byte-level BPE writes each byte as a character; a piece with any other character stands for
    itself.
    """
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:
        return piece


def _characters() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own bytes, the rest follow from
    U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = sorted(set(range(256)) - printable)
    characters = {chr(256 + index): byte for index, byte in enumerate(others)}
    return characters | {chr(byte): byte for byte in printable}


BYTE_OF = _characters()
