"""Python subprocesses that import nothing from the current folder, and installed versions."""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator


@contextlib.contextmanager
def safe_path(**changes: str) -> Iterator[None]:
    """Within the block, Python subprocesses leave the current folder, where a `jax.py` may lie, out
    of `sys.path`.

    changes: other variables of their environment.
    """
    changes = {**changes, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
