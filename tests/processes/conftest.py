"""Parents and workers as a cluster starts them, but on one machine and without jax."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

# What `ladder-jax train` does, with a worker that needs no jax: argv is the place, the patience, and the worker's code.
PARENT = """
import json, sys
from ladder_jax import processes
from ladder_jax.errors import RunFailed, UserError

place, patience, code = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
try:
    processes.supervise(
        processes.Place(**place), command=[sys.executable, "-c", code], job="one",
        patience=processes.Patience(**patience), say=lambda line: print(line, file=sys.stderr),
    )
except UserError as error:
    print("ladder-jax:", error, file=sys.stderr)
    sys.exit(2)
except RunFailed as error:
    print("ladder-jax:", error, file=sys.stderr)
    sys.exit(error.status)
"""

WORKER = """
import os, signal, sys, time
from ladder_jax import processes
from ladder_jax.errors import RunFailed, Stopped, UserError

with processes.attached() as worker:
    me = worker.place.process
{body}
"""


@pytest.fixture
def port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture
def started(port):
    """Starts parents, whose workers run `body`; kills what is left of them."""
    running = []

    def start(body, *, processes=2, only=None, patience=None):
        code = WORKER.format(body=textwrap.indent(textwrap.dedent(body), "    "))
        for process in range(processes) if only is None else only:
            place = {"coordinator": f"localhost:{port}", "processes": processes, "process": process}
            patience = {"start": 20, "lost": 20, "hang": 60, **(patience or {})}
            command = [sys.executable, "-c", PARENT, json.dumps(place), json.dumps(patience), code]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running.append(subprocess.Popen(command, **pipes, env={**os.environ, "PYTHONUNBUFFERED": "1"}))
        return running

    yield start
    for process in running:
        process.kill()
        process.communicate()
