"""Who does not come, and who comes with other settings: refused with one line, before any
collective.
"""

import os
import signal
import socket
import time

import pytest

from ladder_jax.errors import UserError
from ladder_jax.processes import join
from tests.processes.conftest import ends

HOST = os.uname().nodename


@pytest.mark.parametrize("came", [0, 1])
def test_another_never_comes(started, port, came):
    (said,) = ends(started(only=[came], timeouts={"start": 2}), status=1)
    waited = f"process {came} of 2 (host {HOST}) has waited at localhost:{port} for 2 s"
    line = f"ladder-jax: {waited}, and not all processes have joined"
    assert said.startswith(f"{line}: start all with the same --coordinator")
    assert said.count("\n") == 1
    assert "--start-timeout" in said


def test_ctrl_c_while_waiting(started, port):
    """jax waits in native code, where Python runs no handler."""
    (waiting,) = started(only=[0])
    for _ in range(600):
        with socket.socket() as connection:
            if connection.connect_ex(("localhost", port)) == 0:
                break
        time.sleep(0.1)
    waiting.send_signal(signal.SIGINT)
    assert ends([waiting], status=-signal.SIGINT) == [""]


def test_port_is_taken(started, port):
    with socket.create_server(("localhost", port)):
        (said,) = ends(started(only=[0]), status=2)
    assert said.startswith(
        f"ladder-jax: process 0 cannot listen on port {port}: Address already in use"
    )
    assert said.count("\n") == 1


def test_settings_that_differ_are_refused(started):
    """Before any collective: the block is not entered. jax's own count, as a random key's bits may
    depend on them.
    """
    environs = ({}, {"JAX_THREEFRY_PARTITIONABLE": "0"})
    settings = ({"train": {"batch": 4, "steps": 1}}, {"train": {"batch": 8, "steps": 1}})
    body = "raise AssertionError('joined')"
    for said in ends(started(body, settings=settings, counts=(2, 3), environs=environs), status=2):
        line = f"process 1 of 2 (host {HOST}) differs from process 0 (host {HOST})"
        differ = "train.batch is 8, not 4; --processes is 3, not 2; JAX_THREEFRY_PARTITIONABLE is False, not True"
        assert said == f"ladder-jax: {line}: {differ}\n"


def test_first_differences():
    """Of settings that one process alone has, too; the second of three is like the first."""
    mine = {"host": "a", "settings": {"x": None}}
    other = {"host": "c", "settings": {name: 1 for name in "stuvx"}}
    assert join._hosts([mine, mine]) == ["a", "a"]
    with pytest.raises(UserError) as caught:
        join._hosts([mine, mine, other])
    assert str(caught.value) == (
        "process 2 of 3 (host c) differs from process 0 (host a): s is 1, not None; t is 1, not None; u is 1, not None;"
        " v is 1, not None; x is 1, not None"
    )
