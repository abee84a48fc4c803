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
GIVE_UP = 0.9  # process 0's share of the timeout; in the rest it tells the others why it gave up
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
        self.timeout = timeout
        self._client = _client()
        if place is None:
            place = (jax.process_index(), jax.process_count())
        self._process, self._count = place
        self._name = f"ladder_jax/{name}/{next(_opened)}"
        self._rounds = itertools.count()

    def broadcast[T](self, what: str, decide: Callable[[], T]) -> T:
        """What `decide` returns in process 0, which alone calls it. Raises its UserError or
        RunFailed everywhere.
        """
        return self.gather(what, None, lambda _: decide())

    def gather[T](self, what: str, mine: Any, conclude: Callable[[list[Any]], T]) -> T:
        """`conclude` of all processes' reports, in the processes' order; process 0 alone calls it,
        as in `broadcast`.
        """
        if self._client is None:
            return conclude([mine])
        number = next(self._rounds)
        key = f"{self._name}/{number}"
        if self._process == 0:
            before = f"{self._name}/{number - 1}/"
            return self._lead(key, what, mine, conclude, before=before)
        self._put(f"{key}/{self._process}", mine, what)
        until = time.monotonic() + self.timeout
        said = self._get(f"{key}/said", 0, what, until=until)
        if "error" in said:
            raise _error(said["error"])
        return said["value"]

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
            verdict = self.gather(what, error and _described(error), _verdict)
        except RunFailed as lost:
            raise error or lost from None
        if error is not None and not isinstance(error, UserError | RunFailed):
            raise error
        if verdict is not None:
            raise _error(verdict) from None

    def _lead(
        self, key: str, what: str, mine: Any, conclude: Callable[[list[Any]], Any], *, before: str
    ) -> Any:
        """Process 0's part. before: the keys of the round before, which all have read once they are
        in this one.
        """
        until = time.monotonic() + GIVE_UP * self.timeout
        try:
            reports = [mine]
            for process in range(1, self._count):
                reports.append(self._get(f"{key}/{process}", process, what, until=until))
            with _coordination(what):
                self._client.key_value_delete(before)
            value = json.loads(json.dumps(conclude(reports)))
        except Exception as error:
            self._put(f"{key}/said", {"error": _described(error)}, what)
            raise
        self._put(f"{key}/said", {"value": value}, what)
        return value

    def _put(self, key: str, value: Any, what: str) -> None:
        with _coordination(what):
            self._client.key_value_set(key, json.dumps(value))

    def _get(self, key: str, process: int, what: str, *, until: float) -> Any:
        left = min(max(until - time.monotonic(), 0.001), LONGEST)
        milliseconds = int(1000 * left)
        with _coordination(what):
            try:
                value = self._client.blocking_key_value_get(key, milliseconds)
                return json.loads(value)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        raise RunFailed(
            f"process {process} of {self._count} has not answered within {self.timeout:g} s: {what}"
        )


def _client() -> Any:
    """jax's coordination client, which has no public name; None in a single process."""
    if not jax.distributed.is_initialized():
        return None
    from jax._src import distributed

    return distributed.global_state.client


def first_of[T](reports: Sequence[T | None]) -> tuple[T | None, str]:
    """The first report that is not None, and its process in words: "" where all processes reported
    the same.
    """
    for process, report in enumerate(reports):
        if report is not None:
            alike = all(other == report for other in reports)
            if alike:
                return report, ""
            return report, f" (process {process} of {len(reports)})"
    return None, ""


def _verdict(reports: list[Fault | None]) -> Fault | None:
    report, whose = first_of(reports)
    if report is None:
        return None
    return {**report, "text": report["text"] + whose}


def _described(error: Exception) -> Fault:
    text = str(error)
    if isinstance(error, UserError):
        return {"kind": "user", "text": text}
    if not isinstance(error, RunFailed):
        line = (text.strip().splitlines() or [""])[0]
        text = f"{type(error).__name__}: {line}"
    return {"kind": "failed", "text": text}


def _error(described: Fault) -> UserError | RunFailed:
    text = described["text"]
    if described["kind"] == "user":
        return UserError(text)
    return RunFailed(text)


@contextlib.contextmanager
def _coordination(what: str) -> Iterator[None]:
    """Raises RunFailed, one line, if the coordination service is gone."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        time.sleep(FAREWELL)
        why = str(error).splitlines()[0]
        raise RunFailed(f"{what}: the processes cannot hear each other: {why}") from None
