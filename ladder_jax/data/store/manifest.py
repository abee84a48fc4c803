"""The manifest of a token store, `manifest.json`, which names no shards before the store is
finished.

Shard `00000` is two files: `00000.tokens`, little-endian integers one after another; and
`00000.offsets`, where each document begins, uint64 [documents + 1]. Until the store is finished
`00000.json`, written last, is its manifest.
"""

import dataclasses
import json
import pathlib

import numpy as np

from ladder_jax import files
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath

FORMAT = "ladder_jax tokens"
VERSIONS = (1, 2)
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Shard:
    """sha256: of its tokens and offsets. source: the digest of the part of the sources that it
    holds; empty in stores of version 1.

    skipped: files of a folder that are no text. empty: documents without any token, which are left
        out.
    """

    name: str
    tokens: int
    documents: int
    sha256: str
    source: str = ""
    empty: int = 0
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Manifest:
    """tokenizer: its name. field: of JSON lines and tables."""

    tokenizer: str
    vocab_size: int
    field: str
    shards: tuple[Shard, ...] = ()

    @property
    def dtype(self) -> str:
        """The smallest that holds every token."""
        if self.vocab_size <= 2**8:
            return "<u1"
        if self.vocab_size <= 2**16:
            return "<u2"
        return "<u4"

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Of the documents' tokens and their order, wherever they came from and lie."""
        digests = [shard.sha256 for shard in self.shards]
        return files.digest(self.tokenizer, self.dtype, digests)

    def sizes(self) -> dict[str, int]:
        """The shards' files, and their bytes."""
        sizes = {}
        for shard in self.shards:
            sizes[f"{shard.name}.tokens"] = shard.tokens * np.dtype(self.dtype).itemsize
            sizes[f"{shard.name}.offsets"] = 8 * (shard.documents + 1)
        return sizes


def read(file: AnyPath) -> Manifest:
    """Raises UserError where the file is no manifest, or one of another version."""
    with files.reading(file):
        content = file.read_bytes()
    try:
        tree = json.loads(content)
        shards = tuple(_known(Shard, shard) for shard in tree["shards"])
        found = _known(Manifest, tree | {"shards": shards})
        version = tree["version"]
        is_ours = tree["format"] == FORMAT
        found.sizes()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise UserError(f"{str(file)!r} is damaged, or not a token store's")
    if version not in VERSIONS:
        raise UserError(
            f"the token store of {str(file)!r} has format version {version}; this ladder_jax reads 1 to {VERSIONS[-1]}"
        )
    return found


def _known[T](kind: type[T], tree: dict) -> T:
    """Of the fields that `kind` has: version 1 has more."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: tree[name] for name in names if name in tree})


def write(manifest: Manifest, file: pathlib.Path) -> None:
    fields = dataclasses.asdict(manifest)
    tree = {"format": FORMAT, "version": VERSIONS[-1], **fields}
    content = json.dumps(tree, indent=1).encode()
    files.write(file, [content], sync=True)
