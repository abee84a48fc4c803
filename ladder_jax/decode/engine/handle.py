"""A submitted request: streamed, awaited or cancelled by the user, moved on by the engine. Imports no jax."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ladder_jax.decode.request import Decoder, Finish, NoNumbers, Piece, Request, Result, TokenSequence

type Listener = Callable[[Piece | Result | BaseException], object]


class Handle:
    """Iterating it yields the request's pieces as they come; `result()` waits for the whole.

    Where the engine runs no thread, waiting drives it. An error in the engine is raised in every thread that waits.
    engine: an `Engine`, of which it needs `threaded`, `step` and `cancel`.
    """

    def __init__(self, request: Request, *, engine: Any, decoder: Decoder | None):
        self.request = request
        self._engine = engine
        self._sequence = TokenSequence(request, decoder=decoder)
        self._changed = threading.Condition()
        self._pieces: list[Piece] = []
        self._outcome: Result | BaseException | None = None
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        return f"Handle({self._outcome or 'not finished'!r}, of {self.request!r})"

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def __iter__(self) -> Iterator[Piece]:
        """All pieces from the first on, at every iteration."""
        taken = 0
        while True:
            self._wait(lambda: len(self._pieces) > taken or self.done)
            if taken == len(self._pieces):
                break
            yield self._pieces[taken]
            taken += 1
        self._finished()

    def result(self, timeout: float | None = None) -> Result:
        """Waits, at most `timeout` seconds. Raises TimeoutError after them, NoNumbers, or the engine's error."""
        self._wait(lambda: self.done, timeout)
        return self._finished()

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with each piece from the first on, and at last with the result or the error.

        It is called in the thread that moves the request on, which waits for it: it must only pass on its argument, for
        example to an event loop, and neither block nor raise.
        """
        with self._changed:
            for piece in self._pieces:
                listener(piece)
            if self.done:
                listener(self._outcome)
            else:
                self._listeners.append(listener)

    def cancel(self) -> None:
        """Ends the request as "cancelled" with its tokens so far: at once if it is queued, else at the next round."""
        self._engine.cancel(self)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> Result | NoNumbers | None:
        """For the engine: the next tokens. Returns the outcome with which it should `end` the request, None for none.

        Tokens after its end are dropped.
        """
        piece, outcome = self._sequence.take(tokens, logprobs)
        self._give(piece)
        return outcome

    def cancelled(self) -> Result:
        """For the engine: the outcome of the tokens so far."""
        piece, result = self._sequence.end(Finish.CANCELLED)
        self._give(piece)
        return result

    def end(self, outcome: Result | BaseException) -> None:
        """For the engine: the request ends."""
        with self._changed:
            self._outcome = outcome
            self._notify(outcome)
            self._listeners.clear()

    def _give(self, piece):
        if piece:
            with self._changed:
                self._pieces.append(piece)
                self._notify(piece)

    def _notify(self, event):
        self._changed.notify_all()
        for listener in self._listeners:
            listener(event)

    def _finished(self):
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

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
