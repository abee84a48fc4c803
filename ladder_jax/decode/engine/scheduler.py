"""Which requests wait, and which slot each running request has. Any thread may use it. Imports no
jax.
"""

import collections
import dataclasses
import threading
from collections.abc import Sequence

from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.request import Finish, Result
from ladder_jax.errors import UserError


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
        self.slots, self.max_queue = slots, max_queue
        # guards all attributes below; notified of new work
        self.changed = threading.Condition(threading.RLock())
        self._queue: collections.deque[Handle] = collections.deque()
        self._running: dict[int, Handle] = {}  # by slot
        self._cancelled: set[Handle] = set()  # those with a slot; the next `admit` ends them
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

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        with self.changed:
            return bool(self._queue or self._running)

    def admit(self) -> list[tuple[int, Handle]]:
        """Frees the slots of cancelled requests and fills free slots from the queue. Returns the
        newly admitted.
        """
        with self.changed:
            for slot, handle in self.running():
                if handle in self._cancelled:
                    self.release(slot, handle.cancelled())
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
            self._cancelled.discard(handle)
            self._end(handle, outcome)

    def cancel(self, handle: Handle) -> None:
        """At once if it waits; if it has a slot, the next `admit` ends it."""
        with self.changed:
            if handle in self._queue:
                self._queue.remove(handle)
                self._end(handle, handle.cancelled())
            elif handle in self._running.values():
                self._cancelled.add(handle)

    def end_all(self, error: BaseException | None = None) -> None:
        """Ends all requests, waiting and running, with the error; without one they are
        cancelled.
        """
        with self.changed:
            self.error = self.error or error
            handles = [*self._running.values(), *self._queue]
            for held in (self._running, self._queue, self._cancelled):
                held.clear()
            for handle in handles:
                self._end(handle, error or handle.cancelled())

    def stats(self) -> Stats:
        with self.changed:
            counts = dict(self._finished), self._prompt_tokens, self._new_tokens
            return Stats(len(self._queue), len(self._running), *counts)

    def _end(self, handle, outcome):
        finished = isinstance(outcome, Result)
        self._finished[str(outcome.finish) if finished else "failed"] += 1
        self._new_tokens += len(outcome.tokens) if finished else 0
        handle.post(outcome)
