"""Python subprocesses that import nothing from the current folder, and installed versions."""

import contextlib
import importlib.metadata
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def starting(**changes: str) -> Iterator[None]:
    """For a block that starts Python processes: they leave the current folder, where a `jax.py` may
    lie, out of `sys.path`, and Ctrl-C to this one, which answers it at the block's end.

    changes: other variables of their environment.
    """
    # multiprocessing's own process warns where this one is killed
    quiet = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]))
    changes = {**changes, "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": quiet}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        with _interrupted_later():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """The block's processes begin with the signal blocked, as the thread is that starts them.
    Another thread may receive it meanwhile: so its handler is another, too.
    """
    received = []
    is_main = threading.current_thread() is threading.main_thread()
    resource_tracker.ensure_running()  # to start it ends a block of the signal
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if is_main:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
