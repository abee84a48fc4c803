"""The engine: a queue for its slots, and rounds that move all requests on, driven by its user or by a
thread of its own.
"""

import collections
import threading
from collections.abc import Sequence

import numpy as np

from ladder_jax.config import DecodeConfig, Execution, Launch, Loop, Quantize
from ladder_jax.config.fields import check_type, member
from ladder_jax.decode import memory, weights
from ladder_jax.decode.engine.handle import Handle, QueueFull, Stats
from ladder_jax.decode.engine.slots import Slots
from ladder_jax.decode.generate import parts_of
from ladder_jax.decode.request import (
    Decoder,
    Finish,
    NoNumbers,
    Request,
    Result,
    check_decoder,
)
from ladder_jax.decode.sampling import Choice
from ladder_jax.decode.steps import CHUNK, run_to_end
from ladder_jax.errors import UserError, whole
from ladder_jax.nn import ModelDef, Params, Transformer
from ladder_jax.parallel.mesh import without_mesh


class Engine:
    """Serves many requests from one batch of `slots` rows:
    `Engine(model).submit(Request([1, 2])).result()`.

    Each round gives free slots to the requests that wait longest, reads one chunk of each new
    prompt, and makes `chunk` tokens in all slots: no request waits for another's long prompt. What
    a request gets does not depend on the others. Rounds are driven by hand (`step`), by a thread
    that waits for a handle, or by the engine's own thread (`start`, or `with engine:`); then any
    thread may submit.
    """

    def __init__(
        self,
        model: Transformer | ModelDef,
        params: Params | weights.Reader | None = None,
        *,
        slots: int = 8,
        capacity: int = 1024,
        max_queue: int = 256,
        chunk: int = CHUNK,
        decoder: Decoder | None = None,
        loop: Loop = Loop.UNROLLED,
        launch: Launch = Launch.AUTO,
        quantize: Quantize = Quantize.NONE,
        prefill_chunk: int = DecodeConfig.prefill_chunk,
        interleave: int = 1,
    ):
        """A ModelDef needs `params`: float32 and stacked as they are stored, in memory or read one
        by one.

        capacity: the most tokens of a request, prompt and new ones together; every slot has room
            for them.
        max_queue: how many requests may wait for a slot.
        chunk: tokens that a round makes in each slot. prefill_chunk: the most tokens of a prompt
            that it reads.
        interleave: 2 reads a prompt in two halves in turn.
        decoder: the bytes of tokens; without it there is no text, and no stop strings.

        Raises UserError for a mesh with data ranks, and where the devices' memory is too small.
        """
        definition, params = parts_of(model, params)
        if definition.layout.batch_ranks > 1:
            raise UserError(
                f"an engine is one replica of the model: mesh.data x mesh.fsdp must be 1,"
                f" not {definition.layout.batch_ranks}; make an engine for each"
            )
        sizes = dict(slots=slots, capacity=capacity, chunk=chunk, prefill_chunk=prefill_chunk)
        least = dict(capacity=2, prefill_chunk=interleave)
        loop = member(Loop, "loop", loop)
        quantize = member(Quantize, "quantize", quantize)
        launch = member(Launch, "launch", launch)
        definition.check(Execution(interleave=interleave), rows=slots)
        for name, value in {**sizes, "max_queue": max_queue}.items():
            whole(name, value, least=least.get(name, 1))
        check_decoder(decoder)
        form = dict(loop=loop, quantize=quantize)
        memory.check_slots(definition, slots=slots, capacity=capacity, chunk=chunk, **form)
        self.capacity = capacity
        self.slots = slots
        self.max_queue = max_queue
        self._vocab_size = definition.config.vocab_size
        self._decoder = decoder
        with memory.explained(f"for {slots} slots of {capacity:,} tokens and the weights"):
            prepared = weights.prepare(definition, params, **form)
            self._device = Slots(
                definition, prepared, **sizes, **form, interleave=interleave, launch=launch
            )
        self._moving = threading.Lock()  # held through a round: one at a time
        # guards what follows; notified of new work
        self._changed = threading.Condition(threading.RLock())
        self._queue: collections.deque[Handle] = collections.deque()
        self._running: dict[int, Handle] = {}  # by slot
        self._finished = dict.fromkeys([*map(str, Finish), "failed"], 0)
        self._prompt_tokens = self._new_tokens = 0
        # what ended the engine, after which it accepts no request
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def __repr__(self) -> str:
        now = self.stats()
        use = f"{now.running} running, {now.queued} waiting of at most {self.max_queue}"
        return f"Engine({self.slots} slots of {self.capacity:,} tokens: {use})"

    def submit(self, request: Request) -> Handle:
        """Puts a request in the queue. Raises QueueFull, or another UserError for a request that
        cannot be served.
        """
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Handle]:
        """As `submit`: all of them or none."""
        check_type("requests", requests, Sequence)
        handles = [self._handle(request) for request in requests]
        with self._changed:
            self._check()
            waiting = len(self._queue)
            if waiting + len(handles) > self.max_queue:
                raise QueueFull(
                    f"no room for {len(handles)} more in the queue of {self.max_queue} requests: {waiting} wait"
                )
            self._queue.extend(handles)
            self._changed.notify_all()
        return handles

    def _handle(self, request):
        check_type("request", request, Request)
        request.check(vocab_size=self._vocab_size, decoder=self._decoder)
        length = len(request.prompt)
        new = request.max_new_tokens
        if length + new > self.capacity:
            raise UserError(
                f"a prompt of {length} tokens and {new} new ones need {length + new} positions;"
                f" the engine's capacity is {self.capacity}"
            )
        return Handle(request, engine=self, decoder=self._decoder)

    def _check(self):
        """Raises RuntimeError after an error."""
        if self.error:
            raise RuntimeError(f"the engine ended with an error: {self.error!r}") from self.error

    def cancel(self, handle: Handle) -> None:
        """As `handle.cancel()`: at once if it waits; if it has a slot, the next round ends it."""
        with self._changed:
            if handle in self._queue:
                self._queue.remove(handle)
                self._end(handle, handle.take(finish=Finish.CANCELLED))
            else:
                handle.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        with self._changed:
            return bool(self._queue or self._running)

    def step(self) -> bool:
        """One round: fills free slots and makes a chunk of tokens in all. Returns whether requests
        are left.
        """
        with self._moving, without_mesh():
            self._check()
            try:
                self._round()
            except BaseException as error:  # the devices' state is lost: its buffers were donated
                self._end_all(error)
                raise
        return self.busy

    def run(self) -> None:
        """Runs rounds until no request is left."""
        while self.busy:
            self.step()

    def start(self) -> "Engine":
        """Drives the rounds in a thread of the engine's own, until `stop`."""
        with self._changed:
            self._check()
            if self.threaded:
                raise UserError("the engine's thread runs already")
            self._stopping = False
            self._thread = threading.Thread(
                target=self._serve, name="ladder_jax engine", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the thread after its current round. Requests that have not finished are
        cancelled.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread:
            thread.join()
        with self._moving, self._changed:
            # under the lock: a handle waits for the thread only while there is one
            self._thread = None
            self._end_all()

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def threaded(self) -> bool:
        """Whether a thread drives the rounds."""
        return self._thread is not None

    def warm_up(self) -> None:
        """Compiles every program that a request can need. Raises UserError while any request waits
        or runs.
        """
        with self._moving, without_mesh():  # as in the engine's own thread
            if self.busy:
                raise UserError("warm_up is for an engine with nothing to do")
            with memory.explained(f"for {self.slots} slots of {self.capacity:,} tokens"):
                for bucket in self._device.buckets:
                    run_to_end(
                        self._device.insert(0, Request([0] * min(bucket, self.capacity - 1)))
                    )
                    for choice in Choice:
                        new, _ = self._device.decode(choice)
                        self._device.advance(new, active=np.zeros(self.slots, bool))
                new.block_until_ready()

    def stats(self) -> Stats:
        with self._changed:
            return Stats(
                queued=len(self._queue),
                running=len(self._running),
                finished=dict(self._finished),
                prompt_tokens=self._prompt_tokens,
                new_tokens=self._new_tokens,
            )

    def _serve(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self.busy)
                if self._stopping:
                    return
            try:
                self.step()
            except BaseException:  # `step` has passed it on to all handles
                return

    def _round(self):
        """Fills free slots, reads a chunk of each unfinished prompt, and makes a chunk of tokens in
        all slots.

        All of it is sent to the devices before the host waits for the first token.
        """
        for slot, handle in self._admit():
            handle.reading = self._device.insert(slot, handle.request)
        first = self._read()
        if not self._decoding():
            return
        greedy = all(handle.request.is_greedy for _, handle in self._decoding())
        new, logprobs = self._device.decode(Choice.GREEDY if greedy else Choice.SAMPLED)
        for slot, handle, token, logprob in first:  # these need not wait for the chunk
            self._take(slot, handle, np.asarray(token), np.asarray(logprob))
        tokens = np.asarray(new)
        scores = None if logprobs is None else np.asarray(logprobs)
        for slot, handle in self._decoding():
            self._take(slot, handle, tokens[slot], None if scores is None else scores[slot])
        active = np.zeros(len(tokens), bool)
        active[[slot for slot, _ in self._decoding()]] = True
        self._device.advance(new, active=active)

    def _read(self):
        """Reads the next chunk of prompts. Of those it completes: slot, handle, first token and its
        log-probability.
        """
        complete = []
        for slot, handle in self._in_slots():
            if not handle.reading:
                continue
            try:
                next(handle.reading)
            except StopIteration as end:
                handle.reading = None
                complete.append((slot, handle, *end.value))
        return complete

    def _decoding(self):
        return [(slot, handle) for slot, handle in self._in_slots() if not handle.reading]

    def _take(self, slot, handle, tokens, logprobs):
        if outcome := handle.take(tokens, logprobs):
            self._release(slot, outcome)

    def _in_slots(self):
        with self._changed:
            return list(self._running.items())

    def _admit(self):
        """Frees the slots of cancelled requests and fills free slots from the queue. Returns the
        newly admitted.
        """
        with self._changed:
            for slot, handle in self._in_slots():
                if handle.cancelled:
                    self._release(slot, handle.take(finish=Finish.CANCELLED))
            free = [slot for slot in range(self.slots) if slot not in self._running]
            admitted = [(slot, self._queue.popleft()) for slot in free[: len(self._queue)]]
            self._running.update(admitted)
            self._prompt_tokens += sum(len(handle.request.prompt) for _, handle in admitted)
            return admitted

    def _release(self, slot: int, outcome: Result | NoNumbers) -> None:
        """Frees the slot and ends its request."""
        with self._changed:
            self._end(self._running.pop(slot), outcome)

    def _end_all(self, error: BaseException | None = None) -> None:
        """Ends all requests, waiting and running, with the error; without one they are
        cancelled.
        """
        with self._changed:
            self.error = self.error or error
            handles = [*self._running.values(), *self._queue]
            self._running.clear()
            self._queue.clear()
            for handle in handles:
                self._end(handle, error or handle.take(finish=Finish.CANCELLED))

    def _end(self, handle, outcome):
        handle.reading = None
        finished = isinstance(outcome, Result)
        self._finished[str(outcome.finish) if finished else "failed"] += 1
        self._new_tokens += len(outcome.tokens) if finished else 0
        handle.post(outcome)
