"""A folder that appears whole or not at all.

It is written in a folder beside its place, which nothing reads, and moved at the end. An error, Ctrl-C or
SIGTERM removes what there is; what SIGKILL or a power cut leaves, the next conversion to the same place removes.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import stat
import threading
from collections.abc import Iterator

from ladder_jax.checkpoint import manifest
from ladder_jax.errors import RunFailed, Stopped, UserError

LOCK = ".lock"


def check_free(destination: pathlib.Path) -> None:
    """Raises UserError where something is there already, or no folder can be made there."""
    if destination.is_dir() and not destination.is_symlink() and not any(destination.iterdir()):
        return
    if destination.exists() or destination.is_symlink():
        raise UserError(f"{str(destination)!r} is there already: remove it, or name another place")
    if not destination.parent.is_dir():
        raise UserError(f"there is no folder {str(destination.parent)!r} to write {destination.name!r} into")
    if not os.access(destination.parent, os.W_OK):
        raise UserError(f"the folder {str(destination.parent)!r} cannot be written to")


def check_room(destination: pathlib.Path, *, size: int) -> None:
    """Raises RunFailed where the disk has less room than that many bytes: cheaper than finding out in the middle."""
    free = shutil.disk_usage(destination.parent).free
    if free < size:
        raise RunFailed(f"no space for {str(destination)!r}: {size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free")


@contextlib.contextmanager
def staged(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives the path of a folder to make, which becomes `destination` once the block has ended without an error.

    What is made beside it is gone then.

    Raises UserError where `destination` is taken, or is being written by another process.
    """
    check_free(destination)
    with _terminated(destination):
        folder, lock = _claimed(destination)
        try:
            yield folder / destination.name
            _sync(folder / destination.name)
            os.rename(folder / destination.name, destination)  # over an empty folder, too
            manifest.sync_folder(destination.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            with contextlib.suppress(OSError):  # NFS keeps an open file, and so its folder, until it is closed
                folder.rmdir()


def _claimed(destination: pathlib.Path) -> tuple[pathlib.Path, int]:
    """The folder to write into, emptied of what a kill has left, and its lock, which ends with this process."""
    folder = destination.with_name(f".{destination.name}.converting")
    while True:
        _make(folder)
        file = folder / LOCK
        try:  # a regular file that is open for writing: NFS keeps other hosts out by nothing else
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the folder was just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.fstat(lock).st_ino == file.stat().st_ino:  # else it was just removed
                for left in folder.iterdir():
                    if left != file:
                        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
                return folder, lock
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"another process is writing {str(destination)!r}") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _make(folder: pathlib.Path) -> None:
    """Its name can be foreseen: what is there must be a folder of this user's, not a link to one nor another user's."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):  # it was just removed: the lock finds that out
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UserError(f"{str(folder)!r} is in the way: a link, or another user's; remove it")


def _sync(folder: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        manifest.sync_folder(path)


@contextlib.contextmanager
def _terminated(destination: pathlib.Path) -> Iterator[None]:
    """SIGTERM as an exception, so that what was begun is removed; outside of the main thread it is left alone."""

    def handle(signum: int, _) -> None:
        raise Stopped(f"SIGTERM: {str(destination)!r} was not written", signum=signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
