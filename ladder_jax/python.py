"""Python subprocesses that import nothing from the current folder, and installed versions."""

import contextlib
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def safe_path(**changes: str) -> Iterator[None]:
    """Within the block, Python subprocesses leave the current folder, where a `jax.py` may lie, out
    of `sys.path`, and Ctrl-C to their parent: they would show tracebacks, and it waits that long.

    changes: other variables of their environment.
    """
    changes = {**changes, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    resource_tracker.ensure_running()  # to start it ends a block of the signal
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)  # which raises what came meanwhile


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
