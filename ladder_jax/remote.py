"""Folders in an object store, gs:// and s3://, through the libraries that Orbax uses: etils.epath, fsspec, tensorstore.

An object is written completely or not at all, and later reads and lists see it at once. There are no folders, locks or
renames of folders: what needs those has another form there (checkpoint/store.py, train/lease.py).
"""

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ladder_jax.errors import UserError, unknown

if TYPE_CHECKING:
    import fsspec
    from etils import epath

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
"""The packages that implement the schemes for fsspec. They are not among our dependencies."""

CHECKSUMS = ("crc32c", "md5Hash", "ETag", "etag")  # of an object, computed by the store, the best first


def path(text: str) -> "epath.Path":
    """A remote path. Raises UserError for another scheme, and if the scheme's library is not installed."""
    scheme = text.partition("://")[0]
    if scheme not in LIBRARIES:
        raise unknown(f"scheme in {text!r}:", scheme, LIBRARIES)
    from etils import epath

    opened = epath.Path(text)
    # Lists that were cached would not show what other hosts write.
    if (cache := getattr(files_of(opened), "dircache", None)) is not None:
        cache.use_listings_cache = False
    return opened


def files_of(path: "epath.Path") -> "fsspec.AbstractFileSystem":
    """fsspec's file system of a remote path, the one that epath uses. Raises UserError if its library is missing."""
    from etils.epath import backend

    scheme = os.fspath(path).partition("://")[0]
    try:
        return backend.fsspec_backend.fs(path)
    except ImportError:
        raise UserError(f"{scheme}:// needs {LIBRARIES[scheme]}: pip install {LIBRARIES[scheme]}") from None


def listed(folder: "epath.Path") -> dict[str, dict[str, Any]]:
    """All objects below a folder by their relative names, with what the store says about them, such as `size`."""
    prefix = os.fspath(folder).partition("://")[2].rstrip("/") + "/"
    found = files_of(folder).find(os.fspath(folder), detail=True)
    return {name.partition(prefix)[2]: info for name, info in found.items()}


def checksum(info: dict[str, Any]) -> str:
    """The store's own checksum of an object, such as "md5Hash:..."; empty if it has none. info: as in `listed`."""
    return next((f"{name}:{info[name]}" for name in CHECKSUMS if info.get(name)), "")


def remove(folder: "epath.Path", *, first: str) -> None:
    """Remove all objects below a folder, `first` before the others."""
    with contextlib.suppress(FileNotFoundError):
        (folder / first).unlink()
    with contextlib.suppress(FileNotFoundError):
        files_of(folder).rm(os.fspath(folder), recursive=True)
