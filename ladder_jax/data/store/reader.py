"""Tokens out of a store, by their position among all of them."""

import collections
import hashlib
import os
import pathlib
import threading

import numpy as np

from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import blocks
from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store.fetched import Files
from ladder_jax.errors import UserError, wrong_type
from ladder_jax.files import absolute, is_remote

OPEN_FILES = 128  # of which a process may have but so many
BLOCK = 2**24


class Store:
    """A finished store, opened: `store.read(start, count)`. Any thread may read.

    Files are read, not mapped into memory: where one is cut short or its disk fails, a map ends the process
    without a word. What was read before comes from the system's page cache, as with a map. The first read of each block
    compares it with its digest. Of a store in an object store, a shard is first copied into the cache.

    starts: int64 [documents + 1], the documents' first tokens, and the end.
    """

    def __init__(self, folder: str | os.PathLike):
        """Raises UserError for what is missing, of another size than the manifest says, or no store."""
        if not isinstance(folder, str | os.PathLike):
            raise wrong_type("folder", folder, str, os.PathLike)
        self.folder = absolute(folder) if is_remote(folder) else pathlib.Path(folder).expanduser()
        if not manifests.is_store(self.folder):
            raise UserError(f"there is no token store at {str(folder)!r} (`ladder-jax tokenize` makes one)")
        self.manifest = manifests.read(self.folder / manifests.MANIFEST)
        self._stored = Files(self.folder)
        self._dtype = np.dtype(self.manifest.dtype)
        shards = self.manifest.shards
        self._first = np.concatenate([[0], np.cumsum([shard.tokens for shard in shards])]).astype(np.int64)
        opened = [self._open(shard) for shard in shards]
        self._blocks = [tokens for tokens, _ in opened]
        begins = [offsets[:-1] + first for (_, offsets), first in zip(opened, self._first)]
        self.starts = np.concatenate([*begins, self._first[-1:]])
        self._files: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        documents, tokens = len(self.starts) - 1, int(self.starts[-1])
        return f"Store({str(self.folder)!r}: {documents:,} documents, {tokens:,} tokens of {self.manifest.tokenizer})"

    @property
    def lengths(self) -> np.ndarray:
        """Tokens a document, int64 [documents]."""
        return np.diff(self.starts)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The store's own copy."""
        folder = self.folder / tokenizers.FOLDER
        return tokenizers.load(None if self.manifest.tokenizer == tokenizers.BYTES else folder)

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens [count] from `start` on, all in one shard. Raises UserError where they cannot be read."""
        shard = int(np.searchsorted(self._first, start, side="right")) - 1
        size = self._dtype.itemsize
        path = self._path(self.manifest.shards[shard], "tokens")
        begin = (start - int(self._first[shard])) * size
        try:
            with self._lock:
                file = self._file(shard, path)
                content = os.pread(file, count * size, begin)
                if len(content) != count * size:
                    raise ValueError("it was complete when it was opened, and has been cut short")
                self._blocks[shard](begin, begin + len(content), lambda at, most: os.pread(file, most, at))
        except OSError as error:
            raise UserError(f"cannot read the token store's {str(path)!r}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"the token store's {str(path)!r} is damaged: {error}") from None
        found = np.frombuffer(content, self._dtype)
        if found.size and found.max() >= self.manifest.vocab_size:
            raise UserError(f"the token store's {str(path)!r} is damaged: it holds the token {found.max()}")
        return found

    def verify(self) -> None:
        """Read everything. Raises UserError for the first shard that is not what was written."""
        for shard in self.manifest.shards:
            digest = hashlib.sha256()
            for kind in ("tokens", "offsets"):
                with self._path(shard, kind).open("rb") as file:
                    while block := file.read(BLOCK):
                        digest.update(block)
            if digest.hexdigest() != shard.sha256:
                raise UserError(f"shard {shard.name} of the token store {str(self.folder)!r} is damaged")

    def close(self) -> None:
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if hasattr(self, "_lock"):
            self.close()

    def _file(self, shard: int, path: pathlib.Path) -> int:
        if shard not in self._files:
            if len(self._files) == OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[shard] = os.open(path, os.O_RDONLY)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _open(self, shard: manifests.Shard) -> tuple[blocks.Blocks, np.ndarray]:
        """The digests of a shard's tokens, and its offsets, after comparing all sizes, and the offsets' digests."""
        sizes = {"tokens": shard.tokens * self._dtype.itemsize, "offsets": 8 * (shard.documents + 1)}
        counts = {kind: blocks.count(size) for kind, size in sizes.items()}
        if shard.digests:
            sizes["digests"] = blocks.SIZE * sum(counts.values())
        contents = {}
        for kind, size in sizes.items():
            name = f"{shard.name}.{kind}"
            if (actual := self._stored.size(name)) != size:
                where = str(self.folder / name)
                raise UserError(f"the token store's {where!r} has {actual} bytes, not {size}: it is damaged")
            if kind != "tokens":
                contents[kind] = self._path(shard, kind).read_bytes()
        if len(contents["offsets"]) != sizes["offsets"]:  # of a copy in the cache
            raise UserError(f"the token store's {str(self._path(shard, 'offsets'))!r} was cut short")
        found, digests = np.frombuffer(contents["offsets"], "<u8"), contents.get("digests", b"")
        if shard.digests and hashlib.sha256(digests).hexdigest() != shard.digests:
            raise UserError(f"the token store's {str(self._path(shard, 'digests'))!r} is damaged")
        cut = blocks.SIZE * counts["tokens"]
        if found[0] or found[-1] != shard.tokens or not (found[1:] > found[:-1]).all():
            reason = "its documents do not follow one another"
        elif shard.digests and blocks.digests_of(contents["offsets"]) != digests[cut:]:
            reason = "it is not what was written"
        else:
            return blocks.Blocks(digests[:cut]), found.astype(np.int64)
        raise UserError(f"the token store's {str(self._path(shard, 'offsets'))!r} is damaged: {reason}")

    def _path(self, shard: manifests.Shard, kind: str) -> pathlib.Path:
        return self._stored.path(f"{shard.name}.{kind}")
