"""The walk: cases one after the other in processes of their own, since a program may also end its process."""

import dataclasses
import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from experiments.fuzz_configurations.draw import Case, Outcome, draw

ROOT = pathlib.Path(__file__).parent.parent.parent
EACH = 100  # cases of a process, whose memory grows
STUCK = 3600.0  # seconds of one case, after which its process is ended: for one that hangs, not for a busy machine
FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_backend_optimization_level=0"


def simulate() -> None:
    """Eight devices, and programs that compile quickly: set before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()


def outcomes(cases: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
    """In this process."""
    import jax

    from experiments.fuzz_configurations.compare import outcome

    for number, case in enumerate(cases):
        yield case, outcome(case)
        if number % 10 == 9:
            jax.clear_caches()


def work() -> None:
    """Of each line of standard input, "SEED INDEX", the outcome of that case as a line of JSON."""
    simulate()
    asked = (draw(*map(int, line.split())) for line in sys.stdin)
    for _, outcome in outcomes(asked):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


class Worker:
    """A process that does `work`."""

    def __init__(self):
        self.said = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "experiments.fuzz_configurations", "--worker"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said)
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    def outcome(self, case: Case) -> Outcome:
        """Of a process that ends, or is stuck, a failure; then it takes no more cases."""
        began = time.monotonic()
        stuck = threading.Timer(STUCK, self.process.kill)
        stuck.start()
        try:
            print(case.seed, case.index, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        stuck.cancel()
        if answer:
            found = json.loads(answer)
            return Outcome(**found | {"done": tuple(found["done"])})
        status = self.process.wait()
        self.said.seek(0)
        last = "".join(self.said.readlines()[-20:])
        return Outcome("failed", f"the process ended with status {status}:\n{last}", (), time.monotonic() - began)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.said.close()


def walk(
    seed: int, *, count: int | None, seconds: float | None, processes: int, first: int = 0
) -> Iterator[tuple[Case, Outcome]]:
    """Until `count` cases have run, or no case begins after so many seconds."""
    until = float("inf") if seconds is None else time.monotonic() + seconds
    indices = itertools.count(first) if count is None else iter(range(first, first + count))
    found: queue.Queue[tuple[Case, Outcome] | None] = queue.Queue()
    threads = [threading.Thread(target=_share, args=(seed, indices, until, found)) for _ in range(processes)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for _ in threads:
        while (pair := found.get()) is not None:
            yield pair


def _share(seed: int, indices: Iterator[int], until: float, found: queue.Queue) -> None:
    """Takes cases for as long as there are any, in one process after the other."""
    worker, left = None, 0
    try:
        while time.monotonic() < until and (index := next(indices, None)) is not None:
            if left == 0:
                worker, left = Worker(), EACH
            case = draw(seed, index)
            outcome = worker.outcome(case)
            found.put((case, outcome))
            left -= 1
            if left == 0 or worker.process.returncode is not None:
                worker.end()
                left = 0
    finally:
        if left:
            worker.end()
        found.put(None)
