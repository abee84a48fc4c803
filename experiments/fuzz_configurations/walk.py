"""The walk: cases one after the other in processes of their own, since a program may also end its process."""

import collections
import dataclasses
import json
import pathlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from experiments.fuzz_configurations.compare import Outcome
from experiments.fuzz_configurations.draw import Case, draw

ROOT = pathlib.Path(__file__).parent.parent.parent
EACH = 100  # cases of a process, whose memory grows
STUCK = 600.0  # seconds of one case, after which its process is ended


def outcomes(cases: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
    """In this process."""
    import jax

    from experiments.fuzz_configurations.compare import outcome

    for number, case in enumerate(cases):
        yield case, outcome(case)
        if number % 10 == 9:
            jax.clear_caches()


def worker(seed: int, first: int, every: int) -> None:
    """Prints a line of JSON for each case: before it its index, after it the outcome."""
    cases = (draw(seed, index) for index in range(first, first + EACH * every, every))

    def announced() -> Iterator[Case]:
        for case in cases:
            print(json.dumps({"begins": case.index}), flush=True)
            yield case

    for _, outcome in outcomes(announced()):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


def walk(
    seed: int, *, count: int | None, seconds: float | None, processes: int, first: int = 0
) -> Iterator[tuple[Case, Outcome]]:
    """Until `count` cases have run, or no case begins after so many seconds."""
    found: queue.Queue[tuple[Case, Outcome] | None] = queue.Queue()
    until = time.monotonic() + seconds if seconds is not None else None
    last = first + count if count is not None else None
    goes_on = lambda index: (last is None or index < last) and (until is None or time.monotonic() < until)
    starts = range(first, first + processes)
    share = lambda start: (seed, start, processes, goes_on, found.put)
    threads = [threading.Thread(target=_share, args=share(start), daemon=True) for start in starts]
    for thread in threads:
        thread.start()
    for _ in threads:
        while (pair := found.get()) is not None:
            yield pair
    for thread in threads:
        thread.join()


def _share(seed: int, index: int, every: int, goes_on: Callable[[int], bool], put: Callable) -> None:
    """The cases of one process after the other."""
    try:
        while goes_on(index):
            index = _run(seed, index, every, goes_on, put)
    finally:
        put(None)


def _run(seed: int, index: int, every: int, goes_on: Callable[[int], bool], put: Callable) -> int:
    """Those of one process; returns the next case's index."""
    command = [sys.executable, "-m", "experiments.fuzz_configurations", "--worker", f"{seed}:{index}:{every}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: collections.deque[str] = collections.deque(maxlen=20)
    listening = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    listening.start()
    began, last = time.monotonic(), index + EACH * every
    stuck = threading.Timer(STUCK, process.kill)
    for line in process.stdout:
        message = json.loads(line)
        stuck.cancel()
        if "begins" not in message:
            put((draw(seed, index), Outcome(**message | {"done": tuple(message["done"])})))
            index += every
            continue
        if not goes_on(index):
            process.kill()
            break
        began, stuck = time.monotonic(), threading.Timer(STUCK, process.kill)
        stuck.start()
    stuck.cancel()
    listening.join()
    process.stdout.close()
    process.stderr.close()
    process.wait()
    if process.returncode and goes_on(index) and index < last:
        text = f"the process ended with status {process.returncode}:\n{''.join(said)}"
        put((draw(seed, index), Outcome("failed", text, (), time.monotonic() - began)))
        index += every
    return index
