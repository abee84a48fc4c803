"""Folders in an object store, gs:// and s3://, through the libraries that Orbax uses: etils.epath, fsspec, tensorstore.

An object is written completely or not at all, and later reads and lists see it at once. There are no folders, locks or
renames of folders: what needs those has another form there (checkpoint/store.py, train/lease.py).
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ladder_jax.errors import RunFailed, UserError, unknown

if TYPE_CHECKING:
    import fsspec
    from etils import epath

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
"""The packages that implement the schemes for fsspec. They are not among our dependencies."""

CHECKSUMS = ("crc32c", "md5Hash", "ETag", "etag")  # of an object, computed by the store, the best first

type Path = "pathlib.Path | epath.Path"


def path(text: str | os.PathLike) -> Path:
    """`text` as an absolute path; of `gs://...` and `s3://...` an epath.Path, which has pathlib's methods.

    Raises UserError for another scheme, and if the scheme's library is not installed.
    """
    text = os.fspath(text)
    if not is_remote(text):
        return pathlib.Path(text).expanduser().absolute()
    scheme = text.partition("://")[0]
    if scheme not in LIBRARIES:
        raise unknown(f"scheme in {text!r}:", scheme, LIBRARIES)
    from etils import epath

    opened = epath.Path(text)
    # Lists that were cached would not show what other hosts write.
    if (cache := getattr(files_of(opened), "dircache", None)) is not None:
        cache.use_listings_cache = False
    return opened


def is_remote(path: str | os.PathLike) -> bool:
    """Whether it has a scheme, as gs://bucket/name has."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)))


def files_of(path: Path) -> "fsspec.AbstractFileSystem":
    """fsspec's file system of a remote path, the one that epath uses. Raises UserError if its library is missing."""
    from etils.epath import backend

    scheme = os.fspath(path).partition("://")[0]
    try:
        return backend.fsspec_backend.fs(path)
    except ImportError:
        raise UserError(f"{scheme}:// needs {LIBRARIES[scheme]}: pip install {LIBRARIES[scheme]}") from None


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    """All objects below a remote folder by their relative names, with what the store says about them, as `size`."""
    prefix = os.fspath(folder).partition("://")[2].rstrip("/") + "/"
    found = files_of(folder).find(os.fspath(folder), detail=True)
    return {name.partition("://")[2].removeprefix(prefix) or name.removeprefix(prefix): found[name] for name in found}


def checksum(info: dict[str, Any]) -> str:
    """The store's own checksum of an object, such as "md5Hash:..."; empty if it has none. info: as in `listed`."""
    return next((f"{name}:{info[name]}" for name in CHECKSUMS if info.get(name)), "")


def remove(folder: Path, *, first: str) -> None:
    """Remove all objects below a remote folder, `first` before the others."""
    with contextlib.suppress(FileNotFoundError):
        (folder / first).unlink()
    with contextlib.suppress(FileNotFoundError):
        files_of(folder).rm(os.fspath(folder), recursive=True)


def kvstore(folder: Path) -> dict[str, Any]:
    """Tensorstore's specification of a folder, local or remote."""
    if not is_remote(folder):
        return {"driver": "file", "path": f"{folder}/"}
    import tensorstore

    return tensorstore.KvStore.Spec(f"{os.fspath(folder)}/").to_json()


@contextlib.contextmanager
def explained(folder: Path, doing: str) -> Iterator[None]:
    """Turns the errors of a disk or a store into one line, RunFailed: "cannot `doing` 'folder': reason"."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:  # the stores' libraries have errors of their own, beside OSError
        if not isinstance(error, OSError) and not is_remote(folder):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300] or type(error).__name__
        raise RunFailed(f"cannot {doing} {str(folder)!r}: {reason}") from None
