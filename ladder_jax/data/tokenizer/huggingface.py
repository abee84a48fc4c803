"""A Hugging Face tokenizer from its files, by the `tokenizers` library."""

import contextlib
import datetime
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ladder_jax.data.tokenizer.chat_template import ChatTemplate
from ladder_jax.data.tokenizer.pieces import Pieces
from ladder_jax.errors import UserError

MAIN = "tokenizer.json"
FILES = (MAIN, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
"""What is read of a tokenizer's folder; only the first must be there."""


class HuggingFace:
    """See Tokenizer. Raises UserError for files that are missing, damaged or of an unsupported kind."""

    def __init__(self, folder: pathlib.Path):
        import tokenizers

        self.folder = folder
        content = _read(folder, MAIN)
        if content is None:
            raise UserError(
                f"{str(folder)!r} holds no {MAIN}: a tokenizer is a folder with one"
                " (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
            )
        with _explained(f"{str(folder / MAIN)!r} is not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            if hasattr(self._tokenizer.model, "dropout"):  # BPE's, for training: it draws the merges at random
                self._tokenizer.model.dropout = None
            described = json.loads(content)
            vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{str(folder / MAIN)!r} has an empty vocabulary: a tokenizer needs one token at least")
        self.name = f"tokenizer-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        self._pieces = Pieces(described.get("decoder"))
        self._config = _object(folder, "tokenizer_config.json")
        self._special = _special_tokens(_object(folder, "special_tokens_map.json") | self._config)
        self.vocab_size = 1 + max(vocabulary.values())
        self._check_around()
        self.stop_ids = self._stop_ids()
        named = self._special.get("bos_token")
        self.begin_id = None if named is None else self._tokenizer.token_to_id(named)
        source = _template(folder, self._config)
        self._chat = None if source is None else ChatTemplate(source, special=self._special)
        self.has_chat = self._chat is not None
        self._contents = (self.name, source, self.stop_ids, tuple(sorted(self._special.items())))

    def __eq__(self, other: object) -> bool:
        """Whether both do the same: models that hold copies of one tokenizer are one program to Flax."""
        return isinstance(other, HuggingFace) and self._contents == other._contents

    def __hash__(self) -> int:
        return hash(self._contents)

    def __repr__(self) -> str:
        return f"HuggingFace({str(self.folder)!r}, vocab_size={self.vocab_size}, has_chat={self.has_chat})"

    def encode(self, text: str) -> list[int]:
        return self._ids(text, special=True)

    def encode_bare(self, text: str) -> list[int]:
        return self._ids(text, special=False)

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        table = self._bytes
        return b"".join(table.get(int(token), b"") for token in tokens)

    def decode(self, tokens: Iterable[int]) -> str:
        content = self.to_bytes(tokens)
        if self._pieces.drops_first_space:
            content = content.removeprefix(b" ")
        return content.decode("utf-8", errors="replace")

    def offsets(self, text: str, *, special: bool) -> tuple[list[int], list[tuple[int, int]]]:
        with self._encoding(text):
            found = self._tokenizer.encode(text, add_special_tokens=special)
        return found.ids, found.offsets

    def render(
        self, messages: Sequence[Mapping[str, str]], *, prompt: bool, now: datetime.datetime | None = None
    ) -> str:
        if self._chat is None:
            raise UserError(f"the tokenizer in {str(self.folder)!r} has no chat template")
        return self._chat(messages, prompt=prompt, now=now)

    def chat(self, messages: Sequence[Mapping[str, str]], *, now: datetime.datetime | None = None) -> list[int]:
        # The template writes the special tokens itself, the first one too.
        return self._ids(self.render(messages, prompt=True, now=now), special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        with self._encoding(text):
            # Fast: without the offsets of tokens in the text, a third of the time.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def _encoding(self, text: str) -> contextlib.AbstractContextManager[None]:
        _check_encodes(text)
        return _explained(f"the tokenizer in {str(self.folder)!r} cannot encode this text")

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Each token's bytes. Special tokens are not among them."""
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        written = {index: piece for piece, index in vocabulary.items()} | {i: t.content for i, t in added.items()}
        special = {index for index, token in added.items() if token.special}
        return {index: self._pieces(piece) for index, piece in written.items() if index not in special}

    def _check_around(self) -> None:
        """`tokenizers` compares nothing that a post-processor inserts with the vocabulary."""
        if outside := [token for token in self._ids("", special=True) if token >= self.vocab_size]:
            raise UserError(
                f"{str(self.folder / MAIN)!r} puts token {outside[0]} around every text, which is not in its"
                f" vocabulary (allowed: 0 to {self.vocab_size - 1})"
            )

    def _stop_ids(self) -> tuple[int, ...]:
        named = self._special.get("eos_token")
        found = [] if named is None else [self._tokenizer.token_to_id(named)]
        several = _object(self.folder, "generation_config.json").get("eos_token_id")
        found += several if isinstance(several, list) else [several]
        return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns the errors of `tokenizers` into a UserError: plain Exceptions, and panics of its Rust, which are none."""
    try:
        yield
    except BaseException as error:
        # The class cannot be imported, as it has no module
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error}") from None
        raise


def _check_encodes(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError("the text is not UTF-8, and only a model of bytes could read it") from None


def _read(folder: pathlib.Path, name: str) -> str | None:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {str(folder / name)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{str(folder / name)!r} is not UTF-8 text") from None


def _object(folder: pathlib.Path, name: str) -> dict:
    content = _read(folder, name)
    try:
        found = {} if content is None else json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(folder / name)!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{str(folder / name)!r} must hold a JSON object")
    return found


def _special_tokens(config: dict) -> dict[str, str]:
    """`bos_token` and the like; a token is written as text, or as an object with its `content`."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    content = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    found = {key: value for key, value in content.items() if isinstance(value, str)}
    for key, value in found.items():
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise UserError(f"the tokenizer's {key} holds half of a surrogate pair, which is no character")
    return found


def _template(folder: pathlib.Path, config: dict) -> str | None:
    """A file of its own comes before the configuration; of several templates there, the one called default."""
    if (source := _read(folder, "chat_template.jinja")) is not None:
        return source
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None
