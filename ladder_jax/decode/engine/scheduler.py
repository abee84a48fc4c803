"""Which requests wait, and which slot each running request has. Any thread may use it. Imports no jax."""

import collections
import dataclasses
import threading
from collections.abc import Sequence

from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.request import Finish
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
    """A bounded queue for `slots` slots, first come, first served. After `fail` it accepts no request."""

    def __init__(self, *, slots: int, max_queue: int):
        self.max_queue = max_queue
        self.changed = threading.Condition(threading.RLock())  # guards all attributes below; notified of new work
        self._queue: collections.deque[Handle] = collections.deque()
        self._slots: list[Handle | None] = [None] * slots
        self._cancelled: set[Handle] = set()  # those with a slot; the next `admit` ends them
        self._finished = dict.fromkeys([*map(str, Finish), "failed"], 0)
        self._prompt_tokens = self._new_tokens = 0
        self.error: BaseException | None = None  # after `fail`

    def put(self, handles: Sequence[Handle]) -> None:
        """Queues all of them or none: raises QueueFull."""
        with self.changed:
            self.check()
            waiting = len(self._queue)
            if waiting == self.max_queue:
                raise QueueFull(f"the queue is full: {waiting} requests wait for one of {len(self._slots)} slots")
            if waiting + len(handles) > self.max_queue:
                raise QueueFull(
                    f"{len(handles)} requests do not fit into the queue of {self.max_queue}: {waiting} wait"
                )
            self._queue.extend(handles)
            self.changed.notify_all()

    def check(self) -> None:
        """Raises RuntimeError after `fail`."""
        if self.error:
            raise RuntimeError(f"the engine ended with an error: {self.error!r}") from self.error

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        with self.changed:
            return bool(self._queue) or any(self._slots)

    def admit(self) -> list[tuple[int, Handle]]:
        """Frees the slots of cancelled requests and fills free slots from the queue. Returns the newly admitted."""
        with self.changed:
            for slot, handle in self.running():
                if handle in self._cancelled:
                    self.release(slot, Finish.CANCELLED)
            free = [slot for slot, handle in enumerate(self._slots) if handle is None]
            admitted = [(slot, self._queue.popleft()) for slot in free[: len(self._queue)]]
            for slot, handle in admitted:
                self._slots[slot] = handle
                self._prompt_tokens += len(handle.request.prompt)
            return admitted

    def running(self) -> list[tuple[int, Handle]]:
        with self.changed:
            return [(slot, handle) for slot, handle in enumerate(self._slots) if handle]

    def release(self, slot: int, reason: Finish) -> None:
        """Ends the slot's request and frees the slot."""
        with self.changed:
            self._finish(self._free(slot), reason)

    def drop(self, slot: int, error: Exception) -> None:
        """Ends the slot's request with an error of its own and frees the slot."""
        with self.changed:
            self._free(slot).fail(error)
            self._finished["failed"] += 1

    def cancel(self, handle: Handle) -> None:
        """At once if it waits; if it has a slot, the next `admit` ends it."""
        with self.changed:
            if handle in self._queue:
                self._queue.remove(handle)
                self._finish(handle, Finish.CANCELLED)
            elif handle in self._slots:
                self._cancelled.add(handle)

    def cancel_all(self) -> None:
        self._end_all(lambda handle: self._finish(handle, Finish.CANCELLED))

    def fail(self, error: BaseException) -> None:
        """Ends all requests, waiting and running, with the error."""

        def end(handle: Handle) -> None:
            handle.fail(error)
            self._finished["failed"] += 1

        with self.changed:
            self.error = error
            self._end_all(end)

    def stats(self) -> Stats:
        with self.changed:
            counts = dict(self._finished), self._prompt_tokens, self._new_tokens
            return Stats(len(self._queue), len(self.running()), *counts)

    def _free(self, slot):
        handle, self._slots[slot] = self._slots[slot], None
        self._cancelled.discard(handle)
        return handle

    def _finish(self, handle, reason):
        self._new_tokens += len(handle.finish(reason).tokens)
        self._finished[str(reason)] += 1

    def _end_all(self, end):
        with self.changed:
            handles = [*(handle for _, handle in self.running()), *self._queue]
            self._queue.clear()
            self._cancelled.clear()
            self._slots = [None] * len(self._slots)
            for handle in handles:
                end(handle)
