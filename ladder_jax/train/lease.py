"""The lock of a run's folder in an object store: an object that its owner rewrites every few seconds.

All changes are conditional on the object's generation, which the store compares, so two processes never hold it at the
same time as long as each renews it. If the owner is killed, the object stays, and does not change any more: the next
process waits for EXPIRES seconds and takes it over. No clocks are compared.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import tensorstore

from ladder_jax.errors import UserError
from ladder_jax.files import AnyPath, kvstore

RENEWED, EXPIRES = 15.0, 60.0  # seconds
_NAME = ".lock"


@contextlib.contextmanager
def held(folder: AnyPath, *, say: Callable[[str], None], lost: Callable[[str], None]) -> Iterator[None]:
    """Holds the lease within the block. Raises UserError if another process renews it.

    lost: called in a thread, with a line, where it can no longer be renewed, before another process may take it over.
    """
    store, done = tensorstore.KvStore.open(kvstore(folder)).result(), threading.Event()
    owner = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
    generation = _taken(store, folder, owner, say)

    def renew() -> None:
        nonlocal generation
        renewed, count = time.monotonic(), 0
        while not done.wait(RENEWED):
            count += 1
            with contextlib.suppress(ValueError, OSError):  # tensorstore's: no network; the next attempt may have one
                after = store.write(_NAME, _content(owner, count), if_equal=generation).result(RENEWED).generation
                if not after:  # an earlier attempt may have succeeded without an answer
                    found = store.read(_NAME).result(RENEWED)
                    if found.state == "missing" or _owner(found.value) != owner:
                        return lost(f"another process has taken {str(folder)!r} over")
                    after = found.stamp.generation
                generation, renewed = after, time.monotonic()
            if time.monotonic() - renewed > EXPIRES / 2:
                return lost(f"the lock of {str(folder)!r} could not be renewed for {EXPIRES / 2:g} s")

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(ValueError, OSError):  # else it expires
            store.write(_NAME, None, if_equal=generation).result(RENEWED)


def _taken(store: tensorstore.KvStore, folder: AnyPath, owner: str, say: Callable[[str], None]) -> bytes:
    """The generation of the lease, once it is this process's."""
    before, until = None, 0.0
    while True:
        found = store.read(_NAME).result()
        locked = found.state != "missing" and found.value  # a local run's lock that was copied here is empty
        if locked and before is None:
            before, until = found.stamp.generation, time.monotonic() + EXPIRES
            say(f"{str(folder)!r} is locked: waiting {EXPIRES:g} s, in case its owner has been killed")
        if locked and found.stamp.generation != before:
            host = _owner(found.value).partition(" ")[0]
            raise UserError(f"another process is training in {str(folder)!r}, on host {host}")
        if not locked or time.monotonic() >= until:
            after = store.write(_NAME, _content(owner, 0), if_equal=found.stamp.generation).result().generation
            if after:
                return after
        time.sleep(min(2.0, RENEWED / 2))


def _content(owner: str, count: int) -> bytes:
    return json.dumps({"owner": owner, "renewed": count}).encode()


def _owner(content: bytes) -> str:
    """Empty for content of something else."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(content)["owner"])
    return ""
