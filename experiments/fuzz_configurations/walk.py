"""The walk: cases one after the other in processes of their own, since a program may also end its
process.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator

from experiments.fuzz_configurations.draw import Case, Outcome, draw

ROOT = pathlib.Path(__file__).parent.parent.parent
EACH = 100  # cases of a process, whose memory grows
# seconds of one case, after which its process is ended: for one that hangs, not for a busy machine
STUCK = 3600.0
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_backend_optimization_level=0"


def walk(seed: int, indices: Iterable[int], *, seconds: float) -> Iterator[tuple[Case, Outcome]]:
    """Until all cases have run, or no case begins after so many seconds."""
    until = time.monotonic() + seconds
    for left in itertools.batched(indices, EACH):
        while left:
            for outcome in answers(seed, left):
                yield draw(seed, left[0]), outcome
                left = left[1:]
                if time.monotonic() > until:
                    return


def answers(seed: int, indices: tuple[int, ...]) -> Iterator[Outcome]:
    """A process's, of these cases. One in which it ends, or is stuck, is a failure, and the
    last.
    """
    command = [
        sys.executable,
        "-m",
        "experiments.fuzz_configurations",
        str(seed),
        "--worker",
        *map(str, indices),
    ]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=said
        )
        try:
            for _ in indices:
                began = time.monotonic()
                stuck = threading.Timer(STUCK, process.kill)
                stuck.start()
                answer = process.stdout.readline()
                stuck.cancel()
                if not answer:
                    status = process.wait()
                    said.seek(0)
                    last = f"the process ended with status {status}:\n{''.join(said.readlines()[-20:])}"
                    yield Outcome("failed", last, (), time.monotonic() - began)
                    return
                yield Outcome(**json.loads(answer))
        finally:
            process.kill()
            process.communicate()


def work(seed: int, indices: Iterable[int]) -> None:
    """In such a process: of each case the outcome, as a line of JSON."""
    simulate()
    for _, outcome in outcomes(draw(seed, index) for index in indices):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


def simulate() -> None:
    """Eight devices, and programs that compile quickly: set before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


def outcomes(cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
    """In this process."""
    import jax

    from experiments.fuzz_configurations.compare import outcome

    for number, case in enumerate(cases):
        yield case, outcome(case)
        if number % 10 == 9:
            jax.clear_caches()
