"""Agreement between the processes of a run: all act on process 0's decisions, and on every
process's errors.

Messages go through the key-value store of jax's coordination service, not through devices: a
collective never returns if one process has failed. Each wait here raises RunFailed after `timeout`
seconds.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ladder_jax.errors import RunFailed, UserError

TIMEOUT = 1800.0  # seconds
LONGEST = 1e6  # seconds: jax's time-outs are integers of milliseconds
# seconds in which a watchdog, if there is one, ends this process and names the one that failed
FAREWELL = 5.0

type Fault = dict[str, str]  # an error's kind, and its text

# keys are never used twice; all processes open the same agreements in the same order
_opened = itertools.count()


class Agreement:
    """All processes call the same methods in the same order. A process alone decides for itself.

    `what`, in the methods, completes "process 1 of 2 has not answered within 60 s: ...". Values are
    JSON.
    For one thread: each thread that needs agreement opens its own. place: this process and their
    number, where no device may be used yet.
    """

    def __init__(
        self, name: str, *, timeout: float = TIMEOUT, place: tuple[int, int] | None = None
    ):
        from jax._src import distributed  # which has no public name for its client

        self.timeout = timeout
        self._client = distributed.global_state.client  # None in a single process
        if place is None:
            place = (jax.process_index(), jax.process_count())
        self._process, self._count = place
        self._name = f"ladder_jax/{name}/{next(_opened)}"
        self._rounds = itertools.count()

    def gather(self, what: str, mine: Any) -> list[Any]:
        """All processes' reports, in the processes' order, on each of them."""
        if self._client is None:
            return [mine]
        number = next(self._rounds)
        key = f"{self._name}/{number}"
        try:
            self._client.key_value_set(f"{key}/{self._process}", json.dumps(mine))
            late = False
            try:
                self._client.wait_at_barrier(key, int(1000 * min(self.timeout, LONGEST)))
            except jax.errors.JaxRuntimeError as error:
                late = "DEADLINE_EXCEEDED" in str(error)
                if not late:
                    raise
            told = self._client.key_value_dir_get(f"{key}/")
            reports = {int(name.rpartition("/")[2]): json.loads(value) for name, value in told}
            if self._process == 0:  # all have read the round before
                self._client.key_value_delete(f"{self._name}/{number - 1}/")
        except jax.errors.JaxRuntimeError as error:  # the coordination service is gone
            time.sleep(FAREWELL)
            why = str(error).splitlines()[0]
            raise RunFailed(f"{what}: the processes cannot hear each other: {why}") from None
        if late:
            silent = [process for process in range(self._count) if process not in reports]
            first = silent[0] if silent else self._process
            raise RunFailed(
                f"process {first} of {self._count} has not answered within {self.timeout:g} s: {what}"
            )
        return [reports[process] for process in sorted(reports)]

    def broadcast[T](self, what: str, decide: Callable[[], T]) -> T:
        """What `decide` returns in process 0, which alone calls it. Raises its UserError or
        RunFailed everywhere.
        """
        if self._client is None:
            return decide()
        decided = None
        with self.together(what):
            if self._process == 0:
                decided = decide()
        return self.gather(what, decided)[0]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All processes complete the block, or all raise the error of the first one that failed."""
        if self._client is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            reports = self.gather(what, error and _described(error))
        except RunFailed as lost:
            raise error or lost from None
        if error is not None and not isinstance(error, UserError | RunFailed):
            raise error
        fault, whose = first_of(reports)
        if fault is not None:
            kind = UserError if fault["kind"] == "user" else RunFailed
            raise kind(fault["text"] + whose) from None


def first_of[T](reports: Sequence[T | None]) -> tuple[T | None, str]:
    """The first report that is not None, and its process in words; "" for a process alone."""
    for process, report in enumerate(reports):
        if report is not None:
            return report, f" (process {process} of {len(reports)})" if len(reports) > 1 else ""
    return None, ""


def _described(error: Exception) -> Fault:
    text = str(error)
    if isinstance(error, UserError):
        return {"kind": "user", "text": text}
    if not isinstance(error, RunFailed):
        line = (text.strip().splitlines() or [""])[0]
        text = f"{type(error).__name__}: {line}"
    return {"kind": "failed", "text": text}
