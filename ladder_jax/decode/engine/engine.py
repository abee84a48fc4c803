"""The engine: rounds that move all requests on, by hand or in a thread."""

import threading
from collections.abc import Sequence

from ladder_jax.config import DecodeConfig, Launch, Loop, Quantize
from ladder_jax.decode import memory, weights
from ladder_jax.decode.engine.board import Board, Stats
from ladder_jax.decode.engine.compilations import Compilations
from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.engine.request import Request
from ladder_jax.decode.engine.rounds import Rounds
from ladder_jax.decode.engine.slots import Slots
from ladder_jax.decode.engine.task import Decoder, Task
from ladder_jax.decode.generate import check_prompts
from ladder_jax.decode.steps import CHUNK
from ladder_jax.errors import UserError
from ladder_jax.nn import ModelDef, Params, Transformer


class Engine:
    """Serves many requests from one batch of `slots` rows: `Engine(model).submit(Request([1, 2])).result()`.

    Each round, free slots are given to those that wait longest, one block of each new prompt is read, and
    all slots make `chunk` tokens: a long prompt keeps nobody waiting. What a request gets does not depend on
    what else runs. Rounds are driven by hand (`step`), by whoever waits for a handle, or by a thread
    (`start`, or `with engine:`); then any thread may submit.
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
        launch: Launch = Launch.CHAINED,
        quantize: Quantize = Quantize.NONE,
        prefill_chunk: int = DecodeConfig.prefill_chunk,
    ):
        """`params`, float32 and stacked as stored, or what reads them one by one, go with a ModelDef.

        Raises UserError for a mesh with data ranks, and for what the devices' memory does not hold.

        capacity: the most tokens of a request, prompt and new ones together; every slot has room for them.
        max_queue: how many requests may wait for a slot.
        prefill_chunk: the most tokens of a prompt that are read at once.
        decoder: the bytes of tokens; without it there is no text, and no stop strings.
        """
        definition = model.definition if isinstance(model, Transformer) else model
        params = model.params if isinstance(model, Transformer) else params
        if params is None:
            raise UserError("an engine needs a Transformer, or a ModelDef and its params")
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
            ("prefill_chunk", prefill_chunk, 1),
        ):
            if value < least:
                raise UserError(f"{name} must be at least {least}, not {value}")
        form, held = dict(loop=loop, quantize=quantize), memory.held_bytes(params)
        memory.check_slots(definition, slots=slots, positions=capacity + chunk, held=held, **form)
        self.capacity, self.slots, self.max_queue = capacity, slots, max_queue
        self._vocab_size, self._decoder = definition.config.vocab_size, decoder
        self._compilations = Compilations()
        what = f"for {slots} slots of {capacity:,} tokens and the weights"
        with self._compilations, memory.explained(what):
            prepared = weights.prepare(definition, params, **form)
            sizes = dict(slots=slots, capacity=capacity, chunk=chunk, prefill_chunk=prefill_chunk)
            self._device = Slots(definition, prepared, **sizes, **form, launch=launch)

        self._board = Board(slots=slots, max_queue=max_queue)
        self._rounds = Rounds(self._board, self._device)
        self._round = threading.Lock()  # held through a round: one at a time
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, request: Request) -> Handle:
        """Puts a request in the queue. Raises QueueFull, or another UserError for what cannot be served."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Sequence[Request]) -> list[Handle]:
        """As `submit`: all of them or none."""
        tasks = [self._task(request) for request in requests]
        self._board.put(tasks)
        return [task.handle for task in tasks]

    def _task(self, request: Request) -> Task:
        check_prompts([request.prompt], vocab_size=self._vocab_size)
        length, new = len(request.prompt), request.max_new_tokens
        if length + new > self.capacity:
            raise UserError(
                f"a prompt of {length} tokens and {new} new ones need {length + new} positions;"
                f" the engine's capacity is {self.capacity}"
            )
        if request.stop and not self._decoder:
            raise UserError("stop strings need an engine with a decoder; stop_ids do not")
        return Task(Handle(request, engine=self), decoder=self._decoder)

    def cancel(self, handle: Handle) -> None:
        """As `handle.cancel()`."""
        self._board.cancel(handle)

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, if anything did: it takes no request any more."""
        return self._board.error

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return self._board.busy

    def step(self) -> bool:
        """One round: fill free slots, then make a chunk of tokens in all of them. Whether there is more to do."""
        with self._round:
            self._board.check()
            try:
                with self._compilations:
                    self._rounds.next()
            except BaseException as error:  # the devices' state is unknown, as what was donated is gone
                self._board.fail(error)
                raise
        return self.busy

    def run(self) -> None:
        """Rounds until nothing waits or runs."""
        while self.busy:
            self.step()

    def start(self) -> "Engine":
        """Drive the rounds from a thread of the engine's own, until `stop`."""
        with self._board.changed:
            self._board.check()
            if self.threaded:
                raise UserError("the engine's thread runs already")
            self._stopping = False
            self._thread = threading.Thread(target=self._serve, name="ladder_jax engine", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread after the round it is in. Requests that have not finished are cancelled."""
        with self._board.changed:
            self._stopping = True
            self._board.changed.notify_all()
            thread = self._thread
        if thread:
            thread.join()
        with self._round, self._board.changed:
            self._thread = None  # under the same lock: a handle waits for a thread only while there is one
            self._board.cancel_all()
            self._rounds.forget()

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
            with self._compilations, memory.explained(f"for {self.slots} slots of {self.capacity:,} tokens"):
                self._rounds.warm_up(longest=self.capacity - 1)

    def stats(self) -> Stats:
        return self._board.stats()

    def _serve(self) -> None:
        while True:
            with self._board.changed:
                self._board.changed.wait_for(lambda: self._stopping or self.busy)
                if self._stopping:
                    return
            try:
                self.step()
            except BaseException:  # everyone who waits has been given it
                return
