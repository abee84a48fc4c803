"""What one process of a run finds out, all of them act on: process 0's decisions, and each one's errors.

It goes through the key-value store of jax's coordination service, not through devices: whoever waits in a collective
for a process that has failed waits for ever. Each wait here ends after `patience` seconds, in a RunFailed.
"""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ladder_jax.errors import RunFailed, UserError

PATIENCE = 1800.0  # seconds
GIVE_UP = 0.9  # of its patience is process 0's: the rest is for telling the others why
FAREWELL = 5.0  # seconds at most in which they hear of its error, before it ends and their store with it

_opened = itertools.count()  # keys are never used twice; all processes open the same agreements in the same order


class Agreement:
    """All processes call the same methods in the same order; of one process alone each is what it decides.

    `what`, in the methods, completes "process 1 of 2 has not answered within 60 s: ...". Values are JSON.
    One thread at a time: what several threads agree upon has an Agreement each.
    """

    def __init__(self, name: str, *, patience: float = PATIENCE):
        self._client = _client()
        self.patience, self._rounds = patience, itertools.count()
        self._prefix = f"ladder_jax/{name}/{next(_opened)}"

    def decided[T](self, what: str, decide: Callable[[], T]) -> T:
        """What `decide` returns in process 0, which alone calls it. Raises its UserError or RunFailed everywhere."""
        if self._client is None:
            return decide()
        key = f"{self._prefix}/{next(self._rounds)}"
        if jax.process_index() > 0:
            said = self._get(f"{key}/said", 0, what, until=self._until())
            self._put(f"{key}/heard/{jax.process_index()}", True, what)
            if "error" in said:
                raise _error(said["error"])
            return said["value"]
        try:
            value = json.loads(json.dumps(decide()))
        except Exception as error:
            self._put(f"{key}/said", {"error": _described(error)}, what)
            with contextlib.suppress(RunFailed):  # the error is what matters
                self._all(f"{key}/heard", what, until=time.monotonic() + min(FAREWELL, (1 - GIVE_UP) * self.patience))
            raise
        self._put(f"{key}/said", {"value": value}, what)
        self._all(f"{key}/heard", what, until=self._until(first=True))
        self._forget(key, what)
        return value

    def concluded[T](self, what: str, mine: Any, conclude: Callable[[list[Any]], T]) -> T:
        """What `conclude` makes, in process 0, of that which each process reports, in the processes' order."""
        if self._client is None:
            return conclude([mine])
        key = f"{self._prefix}/{next(self._rounds)}"
        if jax.process_index() > 0:
            self._put(f"{key}/{jax.process_index()}", mine, what)
        value = self.decided(what, lambda: conclude([mine, *self._all(key, what, until=self._until(first=True))]))
        if jax.process_index() == 0:
            self._forget(key, what)
        return value

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All processes come through the block, or all leave it with the error of the first that failed."""
        if self._client is None:
            yield
            return
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            verdict = self.concluded(what, None if error is None else _described(error), _verdict)
        except RunFailed as lost:
            raise error or lost from None
        if error is not None and not isinstance(error, UserError | RunFailed):
            raise error
        if verdict is not None:
            raise _error(verdict) from None

    def _until(self, *, first: bool = False) -> float:
        return time.monotonic() + (GIVE_UP if first else 1.0) * self.patience

    def _put(self, key: str, value: Any, what: str) -> None:
        with _coordination(what):
            self._client.key_value_set(key, json.dumps(value))

    def _forget(self, key: str, what: str) -> None:
        with _coordination(what):
            self._client.key_value_delete(f"{key}/")

    def _all(self, key: str, what: str, *, until: float) -> list[Any]:
        return [self._get(f"{key}/{i}", i, what, until=until) for i in range(1, jax.process_count())]

    def _get(self, key: str, process: int, what: str, *, until: float) -> Any:
        left = min(max(until - time.monotonic(), 0.001), 1e6)
        with _coordination(what):
            try:
                return json.loads(self._client.blocking_key_value_get(key, int(1000 * left) or 1))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        count = jax.process_count()
        raise RunFailed(f"process {process} of {count} has not answered within {self.patience:g} s: {what}")


def _client() -> Any:
    """The coordination service's; None for a process alone. It has no public name: only several processes need it."""
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed

    return distributed.global_state.client


def first_of[T](reports: Sequence[T | None]) -> tuple[T | None, str]:
    """The first report that is not None, and whose it is, for a reader: nothing where all reported the same."""
    for process, report in enumerate(reports):
        if report is not None:
            alike = all(other == report for other in reports)
            return report, "" if alike else f" (process {process} of {len(reports)})"
    return None, ""


def _verdict(reports: list[dict[str, str] | None]) -> dict[str, str] | None:
    report, whose = first_of(reports)
    return report and {**report, "text": report["text"] + whose}


def _described(error: Exception) -> dict[str, str]:
    if isinstance(error, UserError | RunFailed):
        return {"kind": "user" if isinstance(error, UserError) else "failed", "text": str(error)}
    line = (str(error).strip().splitlines() or [""])[0]
    return {"kind": "failed", "text": f"{type(error).__name__}: {line}"}


def _error(described: dict[str, str]) -> UserError | RunFailed:
    return (UserError if described["kind"] == "user" else RunFailed)(described["text"])


@contextlib.contextmanager
def _coordination(what: str) -> Iterator[None]:
    """A service that is gone is one line; but who watches over the processes knows which one took it along."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        time.sleep(FAREWELL)  # in which this process is ended, and that one named, if anybody watches
        raise RunFailed(f"{what}: the processes cannot hear each other: {str(error).splitlines()[0]}") from None
