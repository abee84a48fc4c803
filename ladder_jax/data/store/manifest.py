"""The manifest of a token store: `manifest.json` once the store is finished, a journal before that.

Shard `00000` is three files: `00000.tokens`, little-endian integers one after another; `00000.offsets`, where each
document begins, uint64 [documents + 1]; and `00000.digests`, of the blocks of both (see blocks.py).
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re

from ladder_jax import remote
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

FORMAT, VERSION = "ladder_jax tokens", 1
MANIFEST, JOURNAL = "manifest.json", "unfinished.json"
PORTION, FINISHED = re.compile(r"part-([1-9][0-9]{0,5})-of-([1-9][0-9]{0,5})"), "part.json"
"""The folder of a portion (see portion.py), and its manifest."""
SETTINGS = ("tokenizer", "field", "shard_tokens")
"""Fields of Manifest that must be equal in all commands that make one store."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """sha256: of its tokens and offsets. digests: sha256 of its digests; empty in stores of earlier versions.
    parts: digests of the stretches of the sources that are in it.

    skipped: files of a folder that are no text. empty: documents without any token, which are left out.
    """

    name: str
    tokens: int
    documents: int
    sha256: str
    parts: tuple[str, ...]
    empty: int = 0
    skipped: int = 0
    digests: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """tokenizer: its name. dtype: of the tokens, "<u1", "<u2" or "<u4". field: of JSON lines and Parquet."""

    tokenizer: str
    vocab_size: int
    dtype: str
    field: str
    shard_tokens: int
    shards: tuple[Shard, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, field: str, shard_tokens: int) -> "Manifest":
        """Of a store without shards yet."""
        return cls(tokenizer.name, tokenizer.vocab_size, dtype_for(tokenizer.vocab_size), field, shard_tokens)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Of the documents' tokens and their order, wherever they came from and lie."""
        content = json.dumps([self.tokenizer, self.dtype, [shard.sha256 for shard in self.shards]])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def is_store(folder: remote.Path) -> bool:
    """Whether a token store lies there. Raises UserError for one that is not finished."""
    if (folder / JOURNAL).is_file() and not (folder / MANIFEST).is_file():
        raise UserError(f"the token store {str(folder)!r} is not finished: run its `ladder-jax tokenize` again")
    finished = (folder / MANIFEST).is_file()
    if not finished and any(PORTION.fullmatch(path.parent.name) for path in folder.glob(f"part-*/{JOURNAL}")):
        raise UserError(f"the token store {str(folder)!r} is in parts: `ladder-jax tokenize` without --part joins them")
    return finished


def read(file: remote.Path) -> Manifest:
    """Raises UserError where the file is no manifest, or one of another version."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        found, version = tree.pop("format"), tree.pop("version")
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{str(file)!r} is damaged, or not a token store's") from None
    if found != FORMAT:
        raise UserError(f"{str(file)!r} is not a token store's")
    if version != VERSION:
        raise UserError(
            f"the token store of {str(file)!r} has format version {version}; this ladder_jax reads {VERSION}"
        )
    try:
        shards = tuple(Shard(**{**shard, "parts": tuple(shard["parts"])}) for shard in tree.pop("shards"))
        found = Manifest(**tree, shards=shards)
    except (TypeError, KeyError):
        raise UserError(f"{str(file)!r} is damaged, or not a token store's") from None
    if not _is_sound(found):
        raise UserError(f"{str(file)!r} is damaged, or not a token store's")
    return found


def _is_sound(found: Manifest) -> bool:
    """Numbers are numbers, and a shard's name is no path to elsewhere."""
    counts = [found.vocab_size, *(n for one in found.shards for n in (one.tokens, one.documents))]
    return (
        all(isinstance(count, int) and count >= 0 for count in counts)
        and found.tokens < 2**62
        and all(isinstance(text, str) for one in found.shards for text in (one.sha256, one.digests))
        and all(isinstance(one.name, str) and re.fullmatch("[0-9]{5,}", one.name) for one in found.shards)
        and found.dtype == dtype_for(found.vocab_size)
    )


def write(manifest: Manifest, file: pathlib.Path) -> None:
    """Whole or not at all, and on the disk when this returns."""
    tree = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    with partial(file).open("w", encoding="utf-8") as out:
        out.write(json.dumps(tree, indent=1) + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial(file), file)


def partial(file: pathlib.Path) -> pathlib.Path:
    """Where `write` writes, until it is whole."""
    return file.with_name(file.name + ".partial")


def dtype_for(vocab_size: int) -> str:
    """The smallest that holds every token."""
    return "<u1" if vocab_size <= 2**8 else "<u2" if vocab_size <= 2**16 else "<u4"
