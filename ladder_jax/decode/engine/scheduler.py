"""Submitted requests: each by its handle, which its user streams, awaits or cancels; and which of
them wait, and which slot each running one has. Any thread may use both. Imports no jax.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ladder_jax.decode.request import (
    Decoder,
    Finish,
    NoNumbers,
    Piece,
    Request,
    Result,
    TokenSequence,
)
from ladder_jax.errors import UserError

type Listener = Callable[[Piece | Result | BaseException], object]


class Handle:
    """Iterating it yields the request's pieces as they come; `result()` waits for the whole.

    Where the engine runs no thread, waiting drives it. An error in the engine is raised in every
    thread that waits.
    engine: an `Engine`, of which it needs `threaded`, `step` and `cancel`.
    """

    def __init__(self, request: Request, *, engine: Any, decoder: Decoder | None):
        self.request = request
        self._engine = engine
        self._sequence = TokenSequence(request, decoder=decoder)
        self._changed = threading.Condition()
        # pieces, and at last the result or the error
        self._events: list[Piece | Result | BaseException] = []
        self._listeners: list[Listener] = []
        self.cancelled = False  # while it has a slot

    def __repr__(self) -> str:
        return f"Handle({self._events[-1] if self.done else 'not finished'!r}, of {self.request!r})"

    @property
    def done(self) -> bool:
        return bool(self._events) and isinstance(self._events[-1], Result | BaseException)

    def __iter__(self) -> Iterator[Piece]:
        """All pieces from the first on, at every iteration."""
        taken = 0
        while True:
            self._wait(lambda: len(self._events) > taken)
            event = self._events[taken]
            if isinstance(event, Result):
                return
            if isinstance(event, BaseException):
                raise event
            yield event
            taken += 1

    def result(self, timeout: float | None = None) -> Result:
        """Waits, at most `timeout` seconds. Raises TimeoutError after them, NoNumbers, or the
        engine's error.
        """
        self._wait(lambda: self.done, timeout)
        outcome = self._events[-1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with each piece from the first on, and at last with the result or the
        error.

        It is called in the thread that moves the request on, which waits for it: it must only pass
        on its argument, for example to an event loop, and neither block nor raise.
        """
        with self._changed:
            for event in self._events:
                listener(event)
            self._listeners.append(listener)

    def cancel(self) -> None:
        """Ends the request as "cancelled" with its tokens so far: at once if it is queued, else at
        the next round.
        """
        self._engine.cancel(self)

    def take(self, *new: Any, finish: Finish | None = None) -> Result | NoNumbers | None:
        """For the engine: as `TokenSequence.take`. Returns the outcome that it should `post`, None
        for none.
        """
        piece, outcome = self._sequence.take(*new, finish=finish)
        if piece:
            self.post(piece)
        return outcome

    def post(self, event: Piece | Result | BaseException) -> None:
        """For the engine: what the request's user hears next; a result or an error ends the
        request.
        """
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
            for listener in self._listeners:
                listener(event)

    def _wait(self, ready, timeout=None):
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the request did not finish in {timeout} seconds")
            if self._engine.threaded:
                with self._changed:
                    self._changed.wait_for(ready, left)
            else:
                self._engine.step()


class QueueFull(UserError):
    """The queue holds as many requests as it may. A server answers "try again later"."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the engine started; `queued` and `running` are current.

    finished: requests by reason: "stop", "length", "cancelled", "failed".
    prompt_tokens: of requests that got a slot. new_tokens: of finished requests.
    """

    queued: int
    running: int
    finished: dict[str, int]
    prompt_tokens: int
    new_tokens: int


class Scheduler:
    """A bounded queue for `slots` slots, first come, first served. After an error it accepts no
    request.
    """

    def __init__(self, *, slots: int, max_queue: int):
        self.slots = slots
        self.max_queue = max_queue
        # guards all attributes below; notified of new work
        self.changed = threading.Condition(threading.RLock())
        self._queue: collections.deque[Handle] = collections.deque()
        self._running: dict[int, Handle] = {}  # by slot
        self._finished = dict.fromkeys([*map(str, Finish), "failed"], 0)
        self._prompt_tokens = self._new_tokens = 0
        self.error: BaseException | None = None  # that ended all requests

    def put(self, handles: Sequence[Handle]) -> None:
        """Queues all of them or none: raises QueueFull."""
        with self.changed:
            self.check()
            waiting = len(self._queue)
            if waiting + len(handles) > self.max_queue:
                raise QueueFull(
                    f"no room for {len(handles)} more in the queue of {self.max_queue} requests: {waiting} wait"
                )
            self._queue.extend(handles)
            self.changed.notify_all()

    def check(self) -> None:
        """Raises RuntimeError after an error."""
        if self.error:
            raise RuntimeError(f"the engine ended with an error: {self.error!r}") from self.error

    def admit(self) -> list[tuple[int, Handle]]:
        """Frees the slots of cancelled requests and fills free slots from the queue. Returns the
        newly admitted.
        """
        with self.changed:
            for slot, handle in self.running():
                if handle.cancelled:
                    self.release(slot, handle.take(finish=Finish.CANCELLED))
            free = [slot for slot in range(self.slots) if slot not in self._running]
            admitted = [(slot, self._queue.popleft()) for slot in free[: len(self._queue)]]
            self._running.update(admitted)
            self._prompt_tokens += sum(len(handle.request.prompt) for _, handle in admitted)
            return admitted

    def running(self) -> list[tuple[int, Handle]]:
        with self.changed:
            return list(self._running.items())

    def release(self, slot: int, outcome: Result | BaseException) -> None:
        """Frees the slot and ends its request."""
        with self.changed:
            handle = self._running.pop(slot)
            self._end(handle, outcome)

    def cancel(self, handle: Handle) -> None:
        """At once if it waits; if it has a slot, the next `admit` ends it."""
        with self.changed:
            if handle in self._queue:
                self._queue.remove(handle)
                self._end(handle, handle.take(finish=Finish.CANCELLED))
            else:
                handle.cancelled = True

    def end_all(self, error: BaseException | None = None) -> None:
        """Ends all requests, waiting and running, with the error; without one they are
        cancelled.
        """
        with self.changed:
            self.error = self.error or error
            handles = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
            for handle in handles:
                self._end(handle, error or handle.take(finish=Finish.CANCELLED))

    def stats(self) -> Stats:
        with self.changed:
            counts = dict(self._finished), self._prompt_tokens, self._new_tokens
            return Stats(len(self._queue), len(self._running), *counts)

    def _end(self, handle, outcome):
        finished = isinstance(outcome, Result)
        self._finished[str(outcome.finish) if finished else "failed"] += 1
        self._new_tokens += len(outcome.tokens) if finished else 0
        handle.post(outcome)
