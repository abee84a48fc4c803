"""Another Python process of ours: it runs the `ladder_jax` that this one runs, and nothing from the current folder.

`python -m` and `python -c` put the current folder before the standard library: a `jax.py` or a `struct.py` there would
be executed. With `-P` alone, a checkout that is the current folder would not be found, or another that is installed.
"""

import contextlib
import importlib.util
import os
import pathlib
import runpy
import sys
from collections.abc import Iterator

_SAFE = "PYTHONSAFEPATH"


def command(entry: str, *arguments: str) -> list[str]:
    """What starts `entry`: "package.module", as `python -m` would, or "package.module:function"."""
    return [sys.executable, "-P", str(pathlib.Path(__file__).absolute()), entry, *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """For the processes that others start while inside: multiprocessing's, which get this one's `sys.path` then."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_SAFE, None)
        else:
            os.environ[_SAFE] = before


def _main() -> None:
    spec = importlib.util.spec_from_file_location("ladder_jax", pathlib.Path(__file__).with_name("__init__.py"))
    package = sys.modules["ladder_jax"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    module, _, function = sys.argv[0].partition(":")
    if function:
        sys.exit(getattr(importlib.import_module(module), function)())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
