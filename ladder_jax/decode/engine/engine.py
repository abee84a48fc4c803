"""The engine: who waits, who has which slot, and the rounds that move all of them on."""

import collections
import dataclasses
import threading

import numpy as np

from ladder_jax.config import Launch, Loop
from ladder_jax.decode import weights
from ladder_jax.decode.engine.compilations import Compilations
from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.engine.request import Finish, Request
from ladder_jax.decode.engine.slots import Slots
from ladder_jax.decode.engine.task import Decoder, Task
from ladder_jax.decode.generate import CHUNK, check_prompts
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition, Params, Transformer


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


class Engine:
    """Serves many requests from one batch of `slots` rows: `Engine(model).submit(Request([1, 2])).result()`.

    Each round, free slots are given to those that wait longest, and all slots make `chunk` tokens. What
    a request gets does not depend on what else runs. Rounds are driven by hand (`step`), by whoever
    waits for a handle, or by a thread (`start`, or `with engine:`); then any thread may submit.
    """

    def __init__(
        self,
        model: Transformer | Definition,
        params: Params | None = None,
        *,
        slots: int = 8,
        capacity: int = 1024,
        max_queue: int = 256,
        chunk: int = CHUNK,
        decoder: Decoder | None = None,
        loop: Loop = Loop.UNROLLED,
        launch: Launch = Launch.CHAINED,
    ):
        """`params`, float32 and stacked as stored, go with a Definition. Raises UserError for a mesh with data ranks.

        capacity: the most tokens of a request, prompt and new ones together; every slot has room for them.
        max_queue: how many requests may wait for a slot.
        decoder: the bytes of tokens; without it there is no text, and no stop strings.
        """
        definition = model.definition if isinstance(model, Transformer) else model
        params = model.params if isinstance(model, Transformer) else params
        if definition.layout.batch_ranks > 1:
            raise UserError(
                f"an engine is one replica of the model: mesh.data x mesh.fsdp must be 1,"
                f" not {definition.layout.batch_ranks}; make an engine for each"
            )
        for name, value, least in (
            ("slots", slots, 1),
            ("capacity", capacity, 2),
            ("max_queue", max_queue, 1),
            ("chunk", chunk, 1),
        ):
            if value < least:
                raise UserError(f"{name} must be at least {least}, not {value}")
        self.capacity, self.max_queue = capacity, max_queue
        self._vocab_size, self._decoder = definition.config.vocab_size, decoder
        self._compilations = Compilations()
        with self._compilations:
            prepared = weights.prepare(definition, params, loop=loop)
            sizes = dict(slots=slots, capacity=capacity, chunk=chunk)
            self._device = Slots(definition, prepared, **sizes, loop=loop, launch=launch)

        self._round = threading.Lock()  # held through a round: one at a time
        self._lock = threading.RLock()  # held briefly: what follows
        self._work = threading.Condition(self._lock)
        self._queue: collections.deque[Task] = collections.deque()
        self._slots: list[Task | None] = [None] * slots
        self._finished = collections.Counter(dict.fromkeys([*Finish, "failed"], 0))
        self._prompt_tokens = self._new_tokens = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, request: Request) -> Handle:
        """Puts a request in the queue. Raises QueueFull, or another UserError for what cannot be served."""
        check_prompts([request.prompt], vocab_size=self._vocab_size)
        length, new = len(request.prompt), request.max_new_tokens
        if length + new > self.capacity:
            raise UserError(
                f"a prompt of {length} tokens and {new} new ones need {length + new} positions;"
                f" the engine's capacity is {self.capacity}"
            )
        if request.stop and not self._decoder:
            raise UserError("stop strings need an engine with a decoder; stop_ids do not")
        task = Task(Handle(request, engine=self), decoder=self._decoder)
        with self._lock:
            self._check_alive()
            if len(self._queue) >= self.max_queue:
                raise QueueFull(
                    f"the queue is full: {self.max_queue} requests wait for one of {len(self._slots)} slots"
                )
            self._queue.append(task)
            self._work.notify()
        return task.handle

    def cancel(self, handle: Handle) -> None:
        """As `handle.cancel()`."""
        with self._lock:
            for task in [task for task in self._queue if task.handle is handle]:
                self._queue.remove(task)
                self._finish(task, Finish.CANCELLED)
            for task in self._slots:
                if task and task.handle is handle:
                    task.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        with self._lock:
            return bool(self._queue) or any(self._slots)

    def step(self) -> bool:
        """One round: fill free slots, then make a chunk of tokens in all of them. Whether there is more to do."""
        with self._round:
            with self._lock:
                self._check_alive()
            try:
                with self._compilations:
                    self._advance(self._admit())
            except BaseException as error:
                self._fail(error)
                raise
        return self.busy

    def run(self) -> None:
        """Rounds until nothing waits or runs."""
        while self.busy:
            self.step()

    def start(self) -> "Engine":
        """Drive the rounds from a thread of the engine's own, until `stop`."""
        with self._lock:
            self._check_alive()
            if self.threaded:
                raise UserError("the engine's thread runs already")
            self._stopping = False
            self._thread = threading.Thread(target=self._serve, name="ladder_jax engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread after the round it is in. Requests that have not finished are cancelled."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
            thread = self._thread
        if thread:
            thread.join()
        with self._round, self._lock:
            self._thread = None  # under the same lock: a handle waits for a thread only while there is one
            self._end_all(lambda task: self._finish(task, Finish.CANCELLED))

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def threaded(self) -> bool:
        """Whether a thread drives the rounds."""
        return self._thread is not None

    @property
    def compilations(self) -> int:
        """How many programs this engine has compiled; after `warm_up` it stays."""
        return self._compilations.count

    def warm_up(self) -> None:
        """Compile everything there is to compile. Only while nothing waits or runs."""
        with self._round:
            if self.busy:
                raise UserError("warm_up is for an engine with nothing to do")
            with self._compilations:
                for bucket in self._device.buckets:
                    self._device.insert(0, Request([0] * min(bucket, self.capacity - 1)))
                    new, _ = self._device.decode()
                    self._device.advance(new, active=np.zeros(len(self._slots), bool))
                new.block_until_ready()

    def stats(self) -> Stats:
        with self._lock:
            running = sum(task is not None for task in self._slots)
            finished = {str(reason): count for reason, count in self._finished.items()}
            return Stats(len(self._queue), running, finished, self._prompt_tokens, self._new_tokens)

    def _admit(self) -> list[tuple]:
        """Frees cancelled slots and fills free ones: (slot, first token, log-probability) of each that was filled."""
        filled = []
        with self._lock:
            for slot, task in enumerate(self._slots):
                if task and task.cancelled:
                    self._release(slot, Finish.CANCELLED)
                if self._slots[slot] is None and self._queue:
                    self._slots[slot] = self._queue.popleft()
                    self._prompt_tokens += len(self._slots[slot].request.prompt)
                    filled.append(slot)
            tasks = [self._slots[slot] for slot in filled]
        return [(slot, *self._device.insert(slot, task.request)) for slot, task in zip(filled, tasks)]

    def _advance(self, first: list[tuple]) -> None:
        """A chunk for all slots; `first` are the first tokens, which need not wait for it."""
        if not any(self._slots):
            return
        new, logprobs = self._device.decode()
        for slot, token, logprob in first:
            self._take(slot, np.asarray(token), np.asarray(logprob))
        tokens, scores = np.asarray(new), np.asarray(logprobs)
        for slot, task in enumerate(self._slots):
            if task:
                self._take(slot, tokens[slot], scores[slot])
        self._device.advance(new, active=np.array([task is not None for task in self._slots]))

    def _take(self, slot: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        if reason := self._slots[slot].take(tokens, logprobs):
            with self._lock:
                self._release(slot, reason)

    def _release(self, slot: int, reason: Finish) -> None:
        task, self._slots[slot] = self._slots[slot], None
        self._finish(task, reason)

    def _finish(self, task: Task, reason: Finish) -> None:
        self._new_tokens += task.finish(reason)
        self._finished[reason] += 1

    def _fail(self, error: BaseException) -> None:
        """After an error the devices' state is unknown (what was donated is gone): the engine is of no more use."""

        def end(task):
            task.handle.end(error)
            self._finished["failed"] += 1

        with self._lock:
            self._error = error
            self._end_all(end)

    def _end_all(self, end) -> None:
        for task in (*self._slots, *self._queue):
            if task:
                end(task)
        self._queue.clear()
        self._slots = [None] * len(self._slots)

    def _check_alive(self) -> None:
        if self._error:
            raise RuntimeError(f"the engine ended with an error: {self._error!r}") from self._error

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._work.wait_for(lambda: self._stopping or self.busy)
                if self._stopping:
                    return
            try:
                self.step()
            except BaseException:  # `step` has given it to everyone who waits
                return
