"""Start a Python subprocess that imports this same copy of `ladder_jax`, and nothing from the
current folder.

`python -m` and `python -c` put the current folder before the standard library, so a `jax.py` or
`struct.py` there would be executed. `-P` prevents that, but alone it would also hide a checkout in
the current folder, or import an installed copy instead. So the subprocess runs this file, which
loads the package beside it.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator

_SAFE = "PYTHONSAFEPATH"


def command(entry: str, *arguments: str) -> list[str]:
    """The command line that runs `entry`: "package.module", as `python -m` does, or
    "package.module:function".
    """
    return [sys.executable, "-P", str(pathlib.Path(__file__).absolute()), entry, *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Within the block, Python subprocesses leave the current folder out of `sys.path`.

    For subprocesses that a library starts, such as multiprocessing's.
    """
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE, None)
        else:
            os.environ[_SAFE] = before


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _main() -> None:
    spec = importlib.util.spec_from_file_location(
        "ladder_jax", pathlib.Path(__file__).with_name("__init__.py")
    )
    package = sys.modules["ladder_jax"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    module, _, function = sys.argv[0].partition(":")
    if function:
        sys.exit(getattr(importlib.import_module(module), function)())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
