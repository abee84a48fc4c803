"""Folders in an object store, gs:// and s3://, through the libraries that Orbax uses: etils.epath,
fsspec, tensorstore.

An object is written completely or not at all, and later reads and lists see it at once. There are
no folders, locks or renames of folders: what needs those has another form there
(checkpoint/store.py, train/folder.py).
"""

import contextlib
import functools
import glob
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ladder_jax.errors import UserError, unknown

if TYPE_CHECKING:
    import fsspec
    from etils import epath

LIBRARIES = {"gs": "gcsfs", "s3": "s3fs"}
"""The packages that implement the schemes for fsspec. They are not among our dependencies."""

DRIVERS = {"gs": "gcs", "s3": "s3"}  # tensorstore's
RETRIED = 90.0  # seconds: an outage of a minute costs nothing


_S3_SETTINGS = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "aws_region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
}


def path(text: str) -> "epath.Path":
    """A remote path. Raises UserError for another scheme, for a pattern, and if the scheme's
    library is not installed.
    """
    scheme = text.partition("://")[0]
    if scheme not in LIBRARIES:
        raise unknown(f"scheme in {text!r}:", scheme, LIBRARIES)
    if glob.has_magic(text):  # fsspec would remove what it matches: of run[1] the folder run1
        raise UserError(f"{text!r}: a folder in an object store must have no *, ? or [ in its name")
    from etils import epath

    opened = epath.Path(text)
    files = files_of(opened)
    # Lists that were cached would not show what other hosts write.
    if (cache := getattr(files, "dircache", None)) is not None:
        cache.use_listings_cache = False
    # fsspec's own say no where the store does not answer, and a run would begin anew.
    files.isfile = functools.partial(_is, files, "file")
    files.isdir = functools.partial(_is, files, "directory")
    return opened


def _is(files: "fsspec.AbstractFileSystem", kind: str, path: str) -> bool:
    try:
        return files.info(path)["type"] == kind
    except FileNotFoundError:
        return False


def kvstore(folder: "epath.Path") -> dict[str, Any]:
    """Tensorstore's specification of a remote folder.

    s3fs reads the address of another store with S3's interface from AWS_ENDPOINT_URL; tensorstore
    has to be given it. Without `use_conditional_write` it asks such a store first and writes then,
    so two runs could take one lock.
    """
    scheme, _, place = os.fspath(folder).partition("://")
    bucket, _, path = place.partition("/")
    # no URL, in which % and # would mean something
    spec = {"driver": DRIVERS[scheme], "bucket": bucket, "path": f"{path}/" if path else ""}
    if scheme == "s3":
        spec["use_conditional_write"] = True
        for field, names in _S3_SETTINGS.items():
            if value := next((os.environ[name] for name in names if os.environ.get(name)), None):
                spec[field] = value
        # else it searches files first, and prints that there are none
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            spec["aws_credentials"] = {"type": "environment"}
    return spec


def files_of(path: "epath.Path") -> "fsspec.AbstractFileSystem":
    """fsspec's file system of a remote path, the one that epath uses. Raises UserError if its
    library is missing.
    """
    from etils.epath import backend

    scheme = os.fspath(path).partition("://")[0]
    try:
        return backend.fsspec_backend.fs(path)
    except ImportError:
        raise UserError(
            f"{scheme}:// needs {LIBRARIES[scheme]}: pip install {LIBRARIES[scheme]}"
        ) from None


def check_bucket(folder: "epath.Path") -> None:
    """Raises UserError if S3 has no such bucket: tensorstore would take that for an object that is
    missing.
    """
    scheme, _, path = os.fspath(folder).partition("://")
    bucket = path.partition("/")[0]
    if scheme == "s3" and not files_of(folder).exists(f"s3://{bucket}"):
        raise UserError(
            f"{os.fspath(folder)!r}: there is no bucket {bucket!r}, or these credentials may not list it"
        )


def listed(folder: "epath.Path") -> dict[str, dict[str, Any]]:
    """All objects below a folder by their relative names, with what the store says about them, such
    as `size`.
    """
    prefix = os.fspath(folder).partition("://")[2].rstrip("/") + "/"
    found = files_of(folder).find(os.fspath(folder), detail=True)
    return {name.partition(prefix)[2]: info for name, info in found.items()}


def remove(folder: "epath.Path", *, first: str) -> None:
    """Remove all objects below a folder, `first` before the others."""
    with contextlib.suppress(FileNotFoundError):
        (folder / first).unlink()
    with contextlib.suppress(FileNotFoundError):
        files_of(folder).rm(os.fspath(folder), recursive=True)


def patiently[T](work: Callable[[], T]) -> T:
    """`work()`, which is called again after an error, for RETRIED seconds; but not after status
    403.

    The stores' libraries have errors of their own, beside OSError, and give up after some seconds,
    or at once. Of 403 s3fs makes a PermissionError, gcsfs an OSError "Forbidden: ...". A 401 may be
    a token that is renewed.
    """
    until = time.monotonic() + RETRIED
    while True:
        try:
            return work()
        except (FileNotFoundError, PermissionError, UserError):
            raise
        except Exception as error:
            if time.monotonic() > until or str(error).startswith("Forbidden: "):
                raise
        time.sleep(1.0)
