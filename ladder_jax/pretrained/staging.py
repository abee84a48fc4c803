"""Create a folder completely or not at all.

It is written in a temporary folder beside the destination, and renamed at the end. After an error
or Ctrl-C the temporary folder is removed; after a signal or a power cut the next conversion to the
same destination removes it.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from ladder_jax import files
from ladder_jax.checkpoint import manifest
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.files import explained

LOCK = ".lock"


def check_free(destination: pathlib.Path) -> None:
    """Raises UserError if `destination` exists and is not an empty folder, or cannot be created."""
    if destination.is_dir() and not destination.is_symlink() and not any(destination.iterdir()):
        return
    if destination.exists() or destination.is_symlink():
        raise UserError(f"{str(destination)!r} is there already: remove it, or name another place")
    parent = _existing(destination.parent)
    if not parent.is_dir():
        raise UserError(f"{str(parent)!r} is no folder, so {str(destination)!r} cannot be created")
    if not os.access(parent, os.W_OK):
        raise UserError(f"the folder {str(parent)!r} cannot be written to")


def check_room(destination: pathlib.Path, *, size: int) -> None:
    """Raises RunFailed if the disk has fewer than `size` bytes free: better now than half-way
    through.
    """
    free = shutil.disk_usage(_existing(destination.parent)).free
    if free < size:
        raise RunFailed(
            f"no space for {str(destination)!r}: {size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free"
        )


def _existing(folder: pathlib.Path) -> pathlib.Path:
    """`folder`, or the lowest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())


@contextlib.contextmanager
def staged(destination: pathlib.Path, *, resumes: bool = False) -> Iterator[pathlib.Path]:
    """Yields the path of a folder to create. It is renamed to `destination` when the block ends
    without an error.

    resumes: what the block writes beside that folder is kept after an interruption, for the next
    block to go on from. Raises UserError if `destination` exists, or another process is writing it,
    and RunFailed for a full disk.
    """
    check_free(destination)
    scratch = destination.with_name(f".{destination.name}.converting")
    folder = scratch / "new"
    removed = scratch
    with explained(destination, "write"):
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = contextlib.ExitStack()
        busy = f"another process is writing {str(destination)!r}"
        lock.enter_context(files.locked(scratch / LOCK, busy=busy))
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed process left
            yield folder
            for path in (folder, *folder.rglob("*")):  # a power cut leaves no half of them
                manifest.sync_folder(path)  # which syncs a file likewise
            os.rename(folder, destination)  # over an empty folder, too
            manifest.sync_folder(destination.parent)
        except BaseException as error:
            if resumes and not isinstance(error, UserError):
                removed = folder
            raise
        finally:
            lock.close()  # NFS keeps the files of a folder that are open
            shutil.rmtree(removed, ignore_errors=True)
