"""A topology's steps played through: when a device computes, waits, and has an all-reduce in flight.

The order of events is the topology's own plan (`residual.Topology.layers`): each step says which outputs it leaves
out of its input, and so which all-reduces it waits for. A device computes one step after another, and the link
carries one all-reduce after another; what is hidden is what of an all-reduce falls inside compute. Compute slows down
while one is in flight.
"""

import dataclasses
from collections.abc import Callable, Iterable

from ladder_jax.residual import Delayed, Desynced, Step


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of a step alone on its device. busy: with memory and matrix units; idle: between its kernels."""

    busy: float
    idle: float

    @property
    def seconds(self) -> float:
        return self.busy + self.idle


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds from the first step's begin. wire: an all-reduce and not compute."""

    name: str
    start: float
    stop: float
    wire: bool


@dataclasses.dataclass(frozen=True)
class Played:
    """seconds: from the first step's begin until all is reduced; compute: of the steps alone; wire: of all-reduces."""

    seconds: float
    compute: float
    wire: float
    all_reduces: int
    bars: tuple[Bar, ...]

    @property
    def exposed(self) -> float:
        """Seconds that communication adds: waited for, or lost because it slows compute."""
        return self.seconds - self.compute


NAMES = {(0,): "attention", (1,): "mlp", (0, 1): "joint"}


def play(steps: Iterable[Step], *, work: Callable[[Step], Work], all_reduce: float, contention: float) -> Played:
    """A topology's steps, of all layers one after another.

    work(step): what a step takes alone; all_reduce: seconds of one; contention: as in `Machine`.
    """
    player = _Player(all_reduce, contention)
    for step in steps:
        player.take(step, work(step))
    return player.finish()


class _Player:
    """Times stand for arrays: of the residual and the sums, when they are whole; of the partial, when it is computed.

    None stands for an array that is zero, as in `residual.State`.
    """

    def __init__(self, all_reduce: float, contention: float):
        self.all_reduce, self.contention = all_reduce, contention
        self.now = self.wire_free = self.residual = self.compute = 0.0
        self.sums: list[float] = []
        self.partial: float | None = None
        self.bars: list[Bar] = []

    def take(self, step: Step, work: Work) -> None:
        launched = self._launch_pending(step)
        # `sums` leaves out those that are None before the first layers, so it may be shorter than `pending_before`.
        needed = launched[: max(0, len(launched) - step.delay)]
        self._compute(step, work, ready=max([self.residual, *needed]))
        if isinstance(step, Delayed):
            self._keep(step, launched)
        elif isinstance(step, Desynced) and step.sync:
            self.residual = self._reduce("sync", self.now)

    def finish(self) -> Played:
        """As `residual.flush`: what is pending is reduced and added."""
        last = [] if self.partial is None else [self._reduce("last", self.partial)]
        seconds = max([self.now, self.residual, *self.sums, *last])
        wires = [bar for bar in self.bars if bar.wire]
        return Played(
            seconds=seconds,
            compute=self.compute,
            wire=sum(bar.stop - bar.start for bar in wires),
            all_reduces=len(wires),
            bars=tuple(sorted(self.bars, key=lambda bar: bar.start)),
        )

    def _launch_pending(self, step: Step) -> list[float]:
        if not isinstance(step, Delayed) or self.partial is None:
            return self.sums
        return [*self.sums, self._reduce("all-reduce", self.partial)]

    def _keep(self, step: Delayed, launched: list[float]) -> None:
        if step.pending_after == 0:
            self.residual = max([self.residual, *launched, self._reduce("all-reduce", self.now)])
            self.sums, self.partial = [], None
            return
        kept = step.pending_after - 1  # besides its own, which is not reduced yet
        added = launched[: max(0, len(launched) - kept)]
        self.residual = max([self.residual, *added])
        self.sums, self.partial = launched[len(added) :], self.now

    def _reduce(self, name: str, ready: float) -> float:
        start = max(ready, self.wire_free)
        self.wire_free = start + self.all_reduce
        self.bars.append(Bar(name, start, self.wire_free, wire=True))
        return self.wire_free

    def _compute(self, step: Step, work: Work, *, ready: float) -> None:
        """All that is in flight was launched before, so the link is busy from now until it is free."""
        start = max(self.now, ready)
        slower = 1 + self.contention * work.busy / work.seconds if work.seconds else 1.0
        window = max(0.0, self.wire_free - start)
        length = work.seconds * slower
        if length > window:
            length = work.seconds + window * (1 - 1 / slower)
        self.now = start + length
        self.compute += work.seconds
        self.bars.append(Bar(NAMES[step.sublayers], start, self.now, wire=False))
