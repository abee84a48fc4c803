"""A request in the hands of the one who asked: stream it, await it, cancel it. Imports no jax."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ladder_jax.decode.engine.request import Piece, Request, Result

Listener = Callable[[Piece | Result | BaseException], object]


class Driver(Protocol):
    """What a handle asks of its engine."""

    threaded: bool

    def step(self) -> bool: ...

    def cancel(self, handle: "Handle") -> None: ...


class Handle:
    """Iterate it for its pieces as they come; `result()` is the whole.

    Where the engine runs no thread, waiting drives it. An error in the engine is raised to all who wait.
    """

    def __init__(self, request: Request, *, engine: Driver):
        self.request = request
        self._engine = engine
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._outcome: Result | BaseException | None = None
        self._listeners: list[Listener] = []

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def __iter__(self) -> Iterator[Piece]:
        """From the first piece, also where it was iterated before."""
        taken = 0
        while True:
            self._wait(lambda: len(self._pieces) > taken or self.done)
            if taken == len(self._pieces):
                break
            yield self._pieces[taken]
            taken += 1
        self._finished()

    def result(self, timeout: float | None = None) -> Result:
        """Waits, at most `timeout` seconds; raises TimeoutError after them."""
        self._wait(lambda: self.done, timeout)
        return self._finished()

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with each piece, from the first, and at last with the result or the engine's error.

        It is called by whichever thread moves the request on, which waits for it: it must pass on what it
        is given, say to an event loop, and neither block nor raise.
        """
        with self._changed:
            for piece in self._pieces:
                listener(piece)
            if self.done:
                listener(self._outcome)
            else:
                self._listeners.append(listener)

    def cancel(self) -> None:
        """End it as "cancelled", with what it has so far: at once if it is queued, else at the next round."""
        self._engine.cancel(self)

    def give(self, piece: Piece) -> None:
        """For the engine: one more piece."""
        with self._changed:
            self._pieces.append(piece)
            self._tell(piece)

    def end(self, outcome: Result | BaseException) -> None:
        """For the engine: no more will come."""
        with self._changed:
            self._outcome = outcome
            self._tell(outcome)
            self._listeners.clear()

    def _tell(self, event: Piece | Result | BaseException) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener(event)

    def _finished(self) -> Result:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _wait(self, ready: Callable[[], bool], timeout: float | None = None) -> None:
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
