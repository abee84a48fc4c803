"""Who does not come, and who comes with other settings: refused with one line, before any collective."""

import os
import socket
import time

import pytest

from tests.processes.conftest import ends

HOST = os.uname().nodename


def test_coordinator_never_comes(started, port):
    before = time.monotonic()
    (said,) = ends(started(only=[1], patience={"start": 2}))
    line = f"ladder-jax: process 1 of 2 (host {HOST}) has not reached process 0 at localhost:{port} within 2 s"
    assert said.startswith(f"{line} (Connection refused): start all with the same --coordinator")
    assert said.count("\n") == 1 and time.monotonic() - before < 30


def test_another_never_comes(started, port):
    """Those that came end with a line each, the first and the third of three."""
    running = started(processes=3, only=[0, 2], patience={"start": 4})
    for index, said in zip((0, 2), ends(running)):
        line = f"ladder-jax: process {index} of 3 (host {HOST}) has waited at localhost:{port} for 4 s, and not all"
        assert said.startswith(line) and said.count("\n") == 1 and "--start-timeout" in said
    assert [process.returncode for process in running] == [1, 1]


def test_port_is_taken(started, port):
    with socket.create_server(("localhost", port)):
        (said,) = ends(running := started(only=[0]))
    assert said.splitlines()[-1].startswith(f"ladder-jax: process 0 cannot listen at localhost:{port}: ")
    assert running[0].returncode == 2 and "Traceback" not in said


@pytest.mark.parametrize(
    "settings, counts, difference",
    [
        (({"train": {"batch": 4}}, {"train": {"batch": 8}}), None, "train.batch is 8, not 4"),
        (({},), (2, 3), "--processes is 3, not 2"),
        (({}, {name: 1 for name in "abcde"}), None, "a is 1, not None; b is 1, not None; c is 1, not None and 2 more"),
    ],
)
def test_settings_that_differ_are_refused(started, settings, counts, difference):
    running = started("raise AssertionError('a collective')", settings=settings, counts=counts)
    for said in ends(running):
        expected = f"process 1 of 2 (host {HOST}) differs from process 0 (host {HOST}): {difference}"
        assert said == f"ladder-jax: {expected}\n"
    assert [process.returncode for process in running] == [2, 2]
    assert all("joined" not in process.stdout.read() for process in running if not process.stdout.closed)
