"""A submitted request, which its user streams, awaits or cancels in any thread. Imports no jax."""

import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterator
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
        # for the engine, while it has a slot: whether it is to end, and what is left of its prompt
        self.cancelled = False
        self.reading: Generator[None, None, Any] | None = None

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
