"""Create a folder completely or not at all.

It is written in a temporary folder beside the destination, and renamed at the end. After an error,
Ctrl-C or SIGTERM, the temporary folder is removed. After SIGKILL or a power cut, the next
conversion to the same destination removes it.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Iterator

from ladder_jax.checkpoint import manifest
from ladder_jax.errors import RunFailed, Stopped, UserError
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
    with _stopped_by_sigterm(destination, resumes=resumes):
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(scratch, destination)
        removed = scratch
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed process left
            with explained(destination, "write"):
                yield folder
                for path in (folder, *folder.rglob("*")):  # a power cut leaves no half of them
                    manifest.sync_folder(path)  # which syncs a file likewise
                os.rename(folder, destination)  # over an empty folder, too
                manifest.sync_folder(destination.parent)
        except BaseException as error:
            if resumes and not isinstance(error, UserError) and not _is_written(destination):
                removed = folder
            raise
        finally:
            shutil.rmtree(removed, ignore_errors=True)
            os.close(lock)
            # on NFS, the open lock kept its folder from being removed
            with contextlib.suppress(OSError):
                removed.rmdir()


def _lock(scratch: pathlib.Path, destination: pathlib.Path) -> int:
    """The lock of a temporary folder, which is created if it is missing. It ends with this process.

    It is a regular file, open for writing: on NFS, only that locks other hosts out. The folder's
    name is predictable, so an existing one must be this user's own folder, and not a link.
    """
    with contextlib.suppress(FileExistsError):
        scratch.mkdir(mode=0o700)
    if scratch.is_symlink() or not scratch.is_dir() or scratch.stat().st_uid != os.geteuid():
        raise UserError(f"{str(scratch)!r} is in the way: a link, or another user's; remove it")
    lock = os.open(scratch / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(f"another process is writing {str(destination)!r}") from None
    return lock


def _is_written(destination: pathlib.Path) -> bool:
    return destination.is_dir() and any(destination.iterdir())


class _Received(BaseException):
    """SIGTERM. No Exception: those are caught for their own reasons, as in jax's compilation
    cache.
    """


@contextlib.contextmanager
def _stopped_by_sigterm(destination: pathlib.Path, *, resumes: bool) -> Iterator[None]:
    """The first SIGTERM ends the block, so that unfinished files are removed; then Stopped says
    what there is.

    In other threads than the main one, which get no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = False

    def receive(*_):
        nonlocal received
        if not received:  # another one does not disturb the removal
            received = True
            raise _Received

    before = signal.signal(signal.SIGTERM, receive)
    try:
        yield
    except BaseException:
        # in compiled code, as in np.fromfile, what was raised becomes a SystemError
        if not received:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if received:
        done = "was written" if _is_written(destination) else "was not written"
        goes_on = (
            "; the same command goes on from here" if resumes and done == "was not written" else ""
        )
        raise Stopped(f"SIGTERM: {str(destination)!r} {done}{goes_on}", signum=signal.SIGTERM)
