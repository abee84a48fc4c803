"""A token store's files on a disk. Those in an object store are copied into the cache when they are first used."""

import contextlib
import hashlib
import os
import pathlib
import tempfile

from ladder_jax import files, remote
from ladder_jax.data.store import manifest as manifests
from ladder_jax.errors import RunFailed, UserError

CACHE = "stores"
"""The folder in the cache; in it each store has one, named by the digest of its address and manifest."""


class Files:
    """`files.size(name)` and `files.path(name)` of a store's folder. Any thread may call them.

    Raises UserError if a file is missing or cannot be copied.
    """

    def __init__(self, folder: remote.Path):
        self._folder, self._local = folder, folder
        self._sizes: dict[str, int] = {}
        self._temporary: tempfile.TemporaryDirectory | None = None
        if remote.is_remote(folder):
            with self._explained(manifests.MANIFEST):
                self._sizes = {name: int(info["size"]) for name, info in remote.listed(folder).items()}
                content = (folder / manifests.MANIFEST).read_bytes()
            self._local = self._cache(hashlib.sha256(os.fspath(folder).encode() + b"\0" + content).hexdigest()[:20])

    def size(self, name: str) -> int:
        """In bytes. An object is not copied for it."""
        with self._explained(name):
            if not remote.is_remote(self._folder):
                return (self._folder / name).stat().st_size
            if name not in self._sizes:
                raise FileNotFoundError(2, os.strerror(2))
            return self._sizes[name]

    def path(self, name: str) -> pathlib.Path:
        """Where the file is on a disk of this machine."""
        local = self._local / name
        if remote.is_remote(self._folder) and not local.is_file():
            with self._explained(name):
                partial = local.with_name(f".{name}.{os.getpid()}.partial")
                try:
                    remote.files_of(self._folder).get_file(os.fspath(self._folder / name), str(partial))
                    os.replace(partial, local)
                finally:
                    partial.unlink(missing_ok=True)
        return local

    def _cache(self, name: str) -> pathlib.Path:
        if (folder := files.cache_folder(f"{CACHE}/{name}")) is not None:
            return folder
        self._temporary = tempfile.TemporaryDirectory(prefix="ladder-jax-store-")  # removed with this object
        return pathlib.Path(self._temporary.name)

    @contextlib.contextmanager
    def _explained(self, name: str):
        try:
            with remote.explained(self._folder / name, "read"):
                yield
        except RunFailed as error:
            raise UserError(str(error).replace("cannot read ", "cannot read the token store's ", 1)) from None
