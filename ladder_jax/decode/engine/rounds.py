"""One round after another: what the board asks for, the slots compute."""

from collections.abc import Generator

import jax
import numpy as np

from ladder_jax.decode.chunks import drained
from ladder_jax.decode.engine.board import Board
from ladder_jax.decode.engine.request import NoNumbers, Request
from ladder_jax.decode.engine.slots import Slots
from ladder_jax.decode.engine.task import Task
from ladder_jax.decode.sampling import NO_NUMBER, Choice


class Rounds:
    """A round fills free slots, reads a block of each prompt that is not all read, and makes a chunk in all slots."""

    def __init__(self, board: Board, device: Slots):
        self._board, self._device = board, device
        self._reading: dict[int, tuple[Task, Generator]] = {}  # by slot: whose prompt is not all read yet

    def next(self) -> None:
        """One round. All of it is sent to the devices before the first token is waited for."""
        for slot, task in self._board.admit():
            self._reading[slot] = task, self._device.insert(slot, task.request)
        first = self._read()
        if not self._decoding():
            return
        new, logprobs = self._device.decode(self._choice())
        for slot, task, token, logprob in first:  # these need not wait for the others' chunk
            self._take(slot, task, np.asarray(token), np.asarray(logprob))
        tokens, scores = np.asarray(new), None if logprobs is None else np.asarray(logprobs)
        for slot, task in self._decoding():
            self._take(slot, task, tokens[slot], None if scores is None else scores[slot])
        for slot in np.flatnonzero((tokens == NO_NUMBER).any(axis=1)):  # also beyond where a request has ended
            self._device.clear(slot)
        active = np.zeros(len(tokens), bool)
        active[[slot for slot, _ in self._decoding()]] = True
        self._device.advance(new, active=active)

    def forget(self) -> None:
        """Prompts that are not all read are nobody's any more."""
        self._reading.clear()

    def warm_up(self, *, longest: int) -> None:
        """Compile everything there is to compile, for prompts of up to `longest` tokens. Nothing may run."""
        for bucket in self._device.buckets:
            drained(self._device.insert(0, Request([0] * min(bucket, longest))))
            for choice in Choice:
                new, _ = self._device.decode(choice)
                self._device.advance(new, active=np.zeros(len(new), bool))
        new.block_until_ready()

    def _read(self) -> list[tuple[int, Task, jax.Array, jax.Array]]:
        """The next block of prompts; for those that end with it slot, task, first token and its log-probability."""
        running, whole = dict(self._board.running()), []
        for slot, (task, blocks) in list(self._reading.items()):
            if running.get(slot) is not task:  # cancelled meanwhile
                del self._reading[slot]
                continue
            try:
                next(blocks)
            except StopIteration as end:
                del self._reading[slot]
                whole.append((slot, task, *end.value))
        return whole

    def _decoding(self) -> list[tuple[int, Task]]:
        return [(slot, task) for slot, task in self._board.running() if slot not in self._reading]

    def _choice(self) -> Choice:
        """The leanest program that gives every slot what it asks for."""
        plain = lambda request: request.temperature == 0 and not request.logprobs
        return Choice.GREEDY if all(plain(task.request) for _, task in self._decoding()) else Choice.SAMPLED

    def _take(self, slot: int, task: Task, tokens: np.ndarray, logprobs: np.ndarray | None) -> None:
        try:
            reason = task.take(tokens, logprobs)
        except NoNumbers as error:  # this request's own: the others go on
            self._board.drop(slot, error)
            self._device.clear(slot)
            return
        if reason:
            self._board.release(slot, reason)
