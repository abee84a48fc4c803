"""Create a folder completely or not at all.

It is written in a temporary folder beside the destination, and renamed at the end. After an error, Ctrl-C or SIGTERM,
the temporary folder is removed. After SIGKILL or a power cut, the next conversion to the same destination removes it.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

from ladder_jax.checkpoint import manifest
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained.sigterm import Sigterm, is_written

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
    """Raises RunFailed if the disk has fewer than `size` bytes free: better now than half-way through."""
    free = shutil.disk_usage(_existing(destination.parent)).free
    if free < size:
        raise RunFailed(f"no space for {str(destination)!r}: {size / 1e6:,.1f} MB needed, {free / 1e6:,.1f} free")


def _existing(folder: pathlib.Path) -> pathlib.Path:
    """`folder`, or the lowest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())


@contextlib.contextmanager
def staged(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the path of a folder to create. It is renamed to `destination` when the block ends without an error.

    Missing folders above it are created, and removed again after an error. Other files that the block creates beside it
    are removed. Raises UserError if `destination` exists, or another process is writing it.
    """
    check_free(destination)
    with _temporary(destination, "converting") as (folder, sigterm):
        _clear(folder)
        yield folder / destination.name
        _sync(folder / destination.name)
        sigterm.hold()  # nothing is undone from here on
        os.rename(folder / destination.name, destination)  # over an empty folder, too
        manifest.sync_folder(destination.parent)


@contextlib.contextmanager
def resumable(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder beside `destination` for the results of long steps, which the next process finds again.

    Removed when the block ends, and after a UserError; kept after a full disk, Ctrl-C, SIGTERM, SIGKILL or a power cut,
    unless `destination` is there by then. Raises UserError if another process is using it.
    """
    with _temporary(destination, "refitting", resumes=True) as (folder, _):
        yield folder


@contextlib.contextmanager
def _temporary(
    destination: pathlib.Path, kind: str, *, resumes: bool = False
) -> Iterator[tuple[pathlib.Path, Sigterm]]:
    """Yields a locked folder beside `destination`, and what holds SIGTERM back. At the end the folder is removed, and
    after an error those above it that were created. With `resumes`, only a UserError removes it before `destination`
    is written.
    """
    folder = destination.with_name(f".{destination.name}.{kind}")
    missing = [above for above in destination.absolute().parents if not above.exists()]
    with Sigterm(destination, resumes=resumes) as sigterm:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            lock, keep = _lock_folder(folder, destination=destination), False
            try:
                sigterm.release()
                yield folder, sigterm
            except BaseException as error:
                keep = resumes and not isinstance(error, UserError) and not is_written(destination)
                raise
            finally:
                sigterm.hold()
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
                if not keep:
                    with contextlib.suppress(OSError):  # on NFS, an open file keeps its folder from being removed
                        folder.rmdir()
        except BaseException:
            # One that is not empty stays: another process uses it, or an interrupted one goes on there.
            with contextlib.suppress(OSError):
                for above in missing:
                    above.rmdir()
            raise


def _clear(folder: pathlib.Path) -> None:
    """Removes what a killed process left, but for the lock."""
    for leftover in folder.iterdir():
        if leftover.name != LOCK:
            is_folder = leftover.is_dir() and not leftover.is_symlink()
            shutil.rmtree(leftover) if is_folder else leftover.unlink()


def _lock_folder(folder: pathlib.Path, *, destination: pathlib.Path) -> int:
    """The lock of a temporary folder, which is created if it is missing. It ends with this process."""
    while True:
        _create_private(folder)
        file = folder / LOCK
        try:  # a regular file, open for writing: on NFS, only that locks other hosts out
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # the folder was just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.fstat(lock).st_ino == file.stat().st_ino:  # else it was just removed
                return lock
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"another process is writing {str(destination)!r}") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _create_private(folder: pathlib.Path) -> None:
    """Create `folder`. Its name is predictable, so an existing one must be this user's own folder, and not a link."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    with contextlib.suppress(FileNotFoundError):  # just removed by another process; opening the lock notices that
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise UserError(f"{str(folder)!r} is in the way: a link, or another user's; remove it")


def _sync(folder: pathlib.Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        manifest.sync_folder(path)
