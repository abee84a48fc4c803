"""Readers of files, fed with generated and damaged ones: at most a UserError of one line, in little
memory and time.

`python -m tests.fuzz READER NUMBER NUMBER+1` runs one input again.
"""

import subprocess
import sys

import pytest

from tests.fuzz.readers import READERS


def feed(reader, count, *, timeout):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fuzz", reader, "0", str(count)],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, (
        f"{done.stdout[-4000:]}\nstatus {done.returncode}, the last: {done.stderr[-300:]}"
    )
    return done.stdout.splitlines()


def test_some_files_each():
    """In one process: a reader that ends it, or hangs, is named by the last input."""
    assert feed("all", 40, timeout=300) == [f"{reader}: 40 inputs, 0 errors" for reader in READERS]


@pytest.mark.full
@pytest.mark.parametrize("reader", READERS)
def test_ten_thousand_files(reader):
    assert feed(reader, 10_000, timeout=3600) == [f"{reader}: 10000 inputs, 0 errors"]
