"""Tokens out of a store, by their position among all of them."""

import contextlib
import functools
import hashlib
import os
import pathlib

import numpy as np

from ladder_jax import files, remote
from ladder_jax.config.fields import check_type
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store.manifest import MANIFEST, Shard
from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, expanded, explained, is_remote

CACHE = "stores"
"""The folder in the cache; in it each store in an object store has one, named by its address and
manifest.
"""


def is_store(folder: AnyPath) -> bool:
    return (folder / MANIFEST).is_file()


class Store:
    """A finished store, opened: `store.read(start, count)`. Any thread may read.

    Files are read, not mapped into memory: where one is cut short or its disk fails, a map ends the
    process without a word. Of a store in an object store, a shard is first copied into the cache,
    and compared with its digest.

    starts: int64 [documents + 1], the documents' first tokens, and the end.
    """

    def __init__(self, folder: str | os.PathLike):
        """Raises UserError for what is missing, of another size than the manifest says, or no
        store.
        """
        check_type("folder", folder, str, os.PathLike)
        self.folder = expanded(folder)
        if not is_store(self.folder):
            raise UserError(
                f"there is no token store at {str(folder)!r} (`ladder-jax tokenize` makes one)"
            )
        self.manifest = manifests.read(self.folder / MANIFEST)
        shards = self.manifest.shards
        if not shards:
            again = "run its `ladder-jax tokenize` again, without --part"
            raise UserError(f"the token store {str(folder)!r} is not finished: {again}")
        self._local = self.folder
        if is_remote(folder):
            self._local = self._cache()
        self._check_sizes()
        lengths = [shard.tokens for shard in shards]
        self._first = np.cumsum([0, *lengths], dtype=np.int64)
        starts = [first + self._offsets(shard)[:-1] for shard, first in zip(shards, self._first)]
        self.starts = np.concatenate([*starts, self._first[-1:]])

    def __repr__(self) -> str:
        manifest = self.manifest
        held = f"{manifest.documents:,} documents, {manifest.tokens:,} tokens"
        return f"Store({str(self.folder)!r}: {held} of {manifest.tokenizer})"

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The store's own copy."""
        if self.manifest.tokenizer == tokenizers.BYTES:
            return tokenizers.load(None)
        return tokenizers.load(self.folder / tokenizers.FOLDER)

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens [count] from `start` on, all in one shard. Raises UserError where they cannot
        be read.
        """
        index = int(np.searchsorted(self._first, start, side="right")) - 1
        shard = self.manifest.shards[index]
        first = start - int(self._first[index])
        found = self._array(shard, "tokens", self.manifest.dtype, count, first=first)
        largest = found.max(initial=0)
        if largest >= self.manifest.vocab_size:
            raise self._damaged(shard, "tokens", f"it holds the token {largest}")
        return found

    def verify(self) -> None:
        """Read everything. Raises UserError for the first shard that is not what was written."""
        for shard in self.manifest.shards:
            if _digest(self._path(shard, "tokens"), self._path(shard, "offsets")) != shard.sha256:
                raise UserError(
                    f"shard {shard.name} of the token store {str(self.folder)!r} is damaged"
                )

    def _check_sizes(self) -> None:
        with _reading(self.folder / MANIFEST):
            sizes = files.sizes(self.folder)
        for name, size in self.manifest.sizes().items():
            where = f"the token store's {str(self.folder / name)!r}"
            found = sizes.get(name)
            if found is None:
                raise UserError(f"cannot read {where}: {os.strerror(2)}")
            if found != size:
                raise UserError(f"{where} has {found} bytes, not {size}: it is damaged")

    def _offsets(self, shard: Shard) -> np.ndarray:
        found = self._array(shard, "offsets", "<u8", shard.documents + 1).astype(np.int64)
        is_whole = found[0] == 0 and found[-1] == shard.tokens
        if not is_whole or (found[1:] <= found[:-1]).any():
            raise self._damaged(shard, "offsets", "its documents do not follow one another")
        return found

    def _array(
        self, shard: Shard, kind: str, dtype: str, count: int, *, first: int = 0
    ) -> np.ndarray:
        path = self._path(shard, kind)
        size = np.dtype(dtype).itemsize
        with _reading(path):
            file = os.open(path, os.O_RDONLY)
            try:
                content = os.pread(file, count * size, first * size)
            finally:
                os.close(file)
        if len(content) != count * size:
            raise self._damaged(
                shard, kind, "it was complete when it was opened, and has been cut short"
            )
        return np.frombuffer(content, dtype)

    def _path(self, shard: Shard, kind: str) -> str:
        """Where the file is on a disk of this machine."""
        name = f"{shard.name}.{kind}"
        local = f"{self._local}/{name}"

        def fetch(partial: str) -> None:
            source = self.folder / name
            with _reading(source):
                remote.files_of(self.folder).get_file(os.fspath(source), partial)
            if kind == "tokens" and _digest(partial, self._path(shard, "offsets")) != shard.sha256:
                raise self._damaged(shard, kind, "it is not what was written")

        if self._local is not self.folder and not os.path.isfile(local):
            with _reading(local):
                files.write_atomically(local, fetch)
        return local

    def _damaged(self, shard: Shard, kind: str, reason: str) -> UserError:
        path = self.folder / f"{shard.name}.{kind}"
        return UserError(f"the token store's {str(path)!r} is damaged: {reason}")

    def _cache(self) -> pathlib.Path:
        address = os.fspath(self.folder).encode()
        content = (self.folder / MANIFEST).read_bytes()
        digest = hashlib.sha256(address + b"\0" + content).hexdigest()
        self._held = contextlib.ExitStack()  # a folder without a cache is removed with this object
        cache = files.cache(f"{CACHE}/{digest[:20]}")
        return self._held.enter_context(cache)


def _digest(*paths: str) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with _reading(path), open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


_reading = functools.partial(explained, doing="read the token store's", kind=UserError)
