"""Processes of one run, as a cluster starts them, on one machine."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

# What `ladder-jax train` does, with other work: argv is the coordinator, their number, this one's,
# the settings and the time-outs.
MEMBER = """
import json, os, signal, sys, time
from ladder_jax import processes
from ladder_jax.errors import RunFailed, Stopped, UserError

coordinator, count, index, settings, timeouts = sys.argv[1], *map(json.loads, sys.argv[2:])
say = lambda line: print(line, file=sys.stderr, flush=True)
spec = processes.ProcessSpec(coordinator, count, index)
try:
    with processes.joined(spec, settings=settings, timeouts=processes.Timeouts(**timeouts), say=say) as heartbeat:
        me = index
        print("joined", flush=True)
{body}
except UserError as error:
    print("ladder-jax:", error, file=sys.stderr)
    sys.exit(2)
except RunFailed as error:
    print("ladder-jax:", error, file=sys.stderr)
    sys.exit(error.status)
"""


@pytest.fixture
def port():
    return free_port()


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def spawning(**pipes):
    """Yields a function that starts a process, with more variables in its environment; kills what
    is left of them.
    """
    running = []

    def spawn(command, **variables):
        environment = {**os.environ, **variables}
        out = dict(stdout=subprocess.PIPE, text=True)
        running.append(subprocess.Popen(command, **out, **pipes, env=environment))
        return running[-1]

    yield spawn
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def spawn():
    with spawning(stderr=subprocess.PIPE) as spawn:
        yield spawn


@pytest.fixture
def started(port, spawn):
    """Starts processes that run `body` once they have joined."""

    def start(
        body="",
        *,
        processes=2,
        only=None,
        settings=({},),
        timeouts=None,
        counts=None,
        environs=({},),
    ):
        code = MEMBER.format(body=textwrap.indent(textwrap.dedent(body) or "pass", " " * 8))
        times = {"start": 60, "lost": 30, "hang": 60, **(timeouts or {})}
        running = []
        for index in range(processes) if only is None else only:
            count = counts[index] if counts else processes
            given = map(json.dumps, (count, index, settings[index % len(settings)], times))
            command = [sys.executable, "-c", code, f"localhost:{port}", *given]
            environ = {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
            running.append(spawn(command, **environ, **environs[index % len(environs)]))
        return running

    return start


def joined(running):
    """Waits until all have joined."""
    assert [process.stdout.readline() for process in running] == ["joined\n"] * len(running)


def ends(running, *, status=None, within=240.0):
    """What each printed on standard error, once all have ended, each with this exit status."""
    until = time.monotonic() + within
    said = [
        process.communicate(timeout=max(0.1, until - time.monotonic()))[1] for process in running
    ]
    assert status is None or {process.returncode for process in running} == {status}, said
    return said
