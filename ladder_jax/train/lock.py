"""The lock of a run's folder: two runs never write into one.

On a disk it is the operating system's lock of a file, which ends with the process. In an object
store it is a lease, an object that its owner rewrites every few seconds. All changes of it are
conditional on the object's generation, which the store compares. If the owner is killed, the object
stays, and does not change any more: the next process waits for EXPIRES seconds and takes it over.
The owner ends before that, GIVES_UP seconds after it began its last renewal that succeeded, which
leaves time for an outage of more than a minute. No clocks are compared.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import tensorstore

from ladder_jax.errors import RunFailed, UserError, one_line
from ladder_jax.files import AnyPath, is_remote, kvstore

NAME = ".lock"
RENEWED, GIVES_UP, EXPIRES = 10.0, 100.0, 120.0  # seconds


def end(line: str) -> None:
    """Ends the process at once: another one may write into the folder from now on."""
    os.write(2, f"ladder-jax: {one_line(line)}\n".encode())
    os._exit(RunFailed.status)


def held(
    folder: AnyPath, *, say: Callable[[str], None], lost: Callable[[str], None] = end
) -> contextlib.AbstractContextManager[None]:
    """Holds the lock of `folder`, which is made if it is missing, in a block. Raises UserError if
    another process does.

    lost: called in a thread, with a line, where a lease can no longer be renewed, before another
        process may take it.
    """
    return _lease(folder, say, lost) if is_remote(folder) else _file_lock(folder)


@contextlib.contextmanager
def _file_lock(folder: pathlib.Path) -> Iterator[None]:
    """The file stays. It is a regular file open for writing because NFS enforces no other lock
    across hosts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is training in {str(folder)!r}") from None
        except OSError as error:  # on a file system without locks nobody is kept out
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                raise
        if not os.fstat(handle).st_nlink:  # removed by the process that had it, just now
            raise UserError(f"another process was about to train in {str(folder)!r}; try again")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _lease(
    folder: AnyPath, say: Callable[[str], None], lost: Callable[[str], None]
) -> Iterator[None]:
    store = tensorstore.KvStore.open(kvstore(folder)).result()
    done = threading.Event()
    owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
    generation, renewed = _taken(store, folder, owner, say)

    def renew() -> None:
        nonlocal generation, renewed
        count = 0
        while not done.wait(max(0.0, min(RENEWED, renewed + GIVES_UP - time.monotonic()))):
            count += 1
            began = time.monotonic()
            left = renewed + GIVES_UP - began
            if left <= 0:
                return lost(f"the lock of {str(folder)!r} could not be renewed for {GIVES_UP:g} s")
            within = min(RENEWED, left)
            # tensorstore's: no network; the next attempt may have one
            with contextlib.suppress(ValueError, OSError):
                after = (
                    store.write(NAME, _content(owner, count), if_equal=generation)
                    .result(within)
                    .generation
                )
                if after:
                    generation, renewed = after, began
                    continue
                found = store.read(NAME).result(within)
                if found.state == "missing" or _owner(found.value) != owner:
                    return lost(f"another process has taken {str(folder)!r} over")
                # of an earlier attempt that succeeded without an answer
                generation = found.stamp.generation

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ValueError, OSError):  # else it expires
            store.write(NAME, None, if_equal=generation).result(RENEWED)


def _taken(
    store: tensorstore.KvStore, folder: AnyPath, owner: str, say: Callable[[str], None]
) -> tuple[bytes, float]:
    """The generation of the lease, once it is this process's, and when its writing began."""
    before, until = None, 0.0
    while True:
        found = store.read(NAME).result()
        # a local run's lock that was copied here is empty
        locked = found.state != "missing" and found.value
        if locked and before is None:
            before, until = found.stamp.generation, time.monotonic() + EXPIRES
            say(
                f"{str(folder)!r} is locked: waiting {EXPIRES:g} s, in case its owner has been killed"
            )
        if locked and found.stamp.generation != before:
            host = _owner(found.value).partition(" ")[0]
            raise UserError(f"another process is training in {str(folder)!r}, on host {host}")
        if not locked or time.monotonic() >= until:
            began = time.monotonic()
            after = (
                store.write(NAME, _content(owner, 0), if_equal=found.stamp.generation)
                .result()
                .generation
            )
            if after:
                return after, began
        time.sleep(min(2.0, RENEWED / 2))


def _content(owner: str, count: int) -> bytes:
    return json.dumps({"owner": owner, "renewed": count}).encode()


def _owner(content: bytes) -> str:
    """Empty for content of something else."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(content)["owner"])
    return ""
