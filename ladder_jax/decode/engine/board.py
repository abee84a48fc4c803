"""Who waits, and who has which slot. Any thread may use it. Imports no jax."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence

from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.engine.request import Finish
from ladder_jax.decode.engine.task import Task
from ladder_jax.errors import UserError


class QueueFull(UserError):
    """As many requests wait as may wait. A server answers with "try again later"."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the engine was made, but for `queued` and `running`, which are of now.

    finished: requests by reason: "stop", "length", "cancelled", "failed".
    prompt_tokens, new_tokens: read, and made for requests that have finished.
    """

    queued: int
    running: int
    finished: dict[str, int]
    prompt_tokens: int
    new_tokens: int


class Board:
    """A bounded queue before `slots` slots, first come, first served. After `fail` it takes nobody any more."""

    def __init__(self, *, slots: int, max_queue: int):
        self.max_queue = max_queue
        self.changed = threading.Condition(threading.RLock())  # guards all that follows; told of what is to be done
        self._queue: collections.deque[Task] = collections.deque()
        self._slots: list[Task | None] = [None] * slots
        self._finished = dict.fromkeys([*map(str, Finish), "failed"], 0)
        self._prompt_tokens = self._new_tokens = 0
        self.error: BaseException | None = None  # after `fail`

    def put(self, tasks: Sequence[Task]) -> None:
        """All of them or none: raises QueueFull."""
        with self.changed:
            self.check()
            waiting = len(self._queue)
            if waiting == self.max_queue:
                raise QueueFull(f"the queue is full: {waiting} requests wait for one of {len(self._slots)} slots")
            if waiting + len(tasks) > self.max_queue:
                raise QueueFull(f"{len(tasks)} requests do not fit into the queue of {self.max_queue}: {waiting} wait")
            self._queue.extend(tasks)
            self.changed.notify_all()

    def check(self) -> None:
        """Raises RuntimeError after `fail`."""
        if self.error:
            raise RuntimeError(f"the engine ended with an error: {self.error!r}") from self.error

    @property
    def busy(self) -> bool:
        """Whether anyone waits or has a slot."""
        with self.changed:
            return bool(self._queue) or any(self._slots)

    def admit(self) -> list[tuple[int, Task]]:
        """Frees the slots of cancelled tasks, and gives free ones to who waits: those, and who has them now."""
        with self.changed:
            for slot, task in self.running():
                if task.cancelled:
                    self.release(slot, Finish.CANCELLED)
            free = [slot for slot, task in enumerate(self._slots) if task is None]
            admitted = [(slot, self._queue.popleft()) for slot in free[: len(self._queue)]]
            for slot, task in admitted:
                self._slots[slot] = task
                self._prompt_tokens += len(task.request.prompt)
            return admitted

    def running(self) -> list[tuple[int, Task]]:
        with self.changed:
            return [(slot, task) for slot, task in enumerate(self._slots) if task]

    def release(self, slot: int, reason: Finish) -> None:
        """The slot's task has ended."""
        with self.changed:
            task, self._slots[slot] = self._slots[slot], None
            self._finish(task, reason)

    def drop(self, slot: int, error: Exception) -> None:
        """The slot's task has failed, and nobody else's: it gets the error."""
        with self.changed:
            task, self._slots[slot] = self._slots[slot], None
            task.handle.end(error)
            self._finished["failed"] += 1

    def cancel(self, handle: Handle) -> None:
        """At once if it waits; if it has a slot, the next `admit` ends it."""
        with self.changed:
            for task in [task for task in self._queue if task.handle is handle]:
                self._queue.remove(task)
                self._finish(task, Finish.CANCELLED)
            for _, task in self.running():
                if task.handle is handle:
                    task.cancelled = True

    def cancel_all(self) -> None:
        self._end_all(lambda task: self._finish(task, Finish.CANCELLED))

    def fail(self, error: BaseException) -> None:
        """Everyone who waits or has a slot gets the error."""

        def end(task):
            task.handle.end(error)
            self._finished["failed"] += 1

        with self.changed:
            self.error = error
            self._end_all(end)

    def stats(self) -> Stats:
        with self.changed:
            counts = dict(self._finished), self._prompt_tokens, self._new_tokens
            return Stats(len(self._queue), len(self.running()), *counts)

    def _finish(self, task: Task, reason: Finish) -> None:
        self._new_tokens += task.finish(reason)
        self._finished[str(reason)] += 1

    def _end_all(self, end: Callable[[Task], None]) -> None:
        with self.changed:
            tasks = [*(task for _, task in self.running()), *self._queue]
            self._queue.clear()
            self._slots = [None] * len(self._slots)
            for task in tasks:
                end(task)
