"""Simulate a topology's steps: when a device computes, waits, and has an all-reduce in flight.

The order of events is that of the topology's steps (`residual.Topology.layers`). Each step leaves the newest outputs
out of its input (`Step.delay`), and so waits for the all-reduces of the others only. A device computes one step after
another, and the link carries one all-reduce after another. An all-reduce is hidden for the time that it overlaps with
compute; compute is slower meanwhile.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

from ladder_jax.residual import Desynced, Silent, Step


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of a step without communication. busy: memory or matrix units work. idle: between kernels."""

    busy: float
    idle: float

    @property
    def seconds(self) -> float:
        return self.busy + self.idle

    def share(self, share: float) -> "Work":
        return Work(share * self.busy, share * self.idle)


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds since the start of the first step. wire: whether it is an all-reduce, not compute."""

    name: str
    start: float
    stop: float
    wire: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """seconds: until the last all-reduce ends. compute: of the steps without communication. wire: of all-reduces."""

    seconds: float
    compute: float
    wire: float
    all_reduces: int
    bars: tuple[Bar, ...] = dataclasses.field(repr=False)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds: by waiting, and by contention with compute."""
        return self.seconds - self.compute


def beside(work: Work, *, wire: float, contention: float) -> float:
    """Seconds of `work` that begins together with a transfer of `wire` seconds: slower while that is in flight."""
    slower = 1 + contention * work.busy / work.seconds if work.seconds else 1.0
    length = work.seconds * slower
    return length if length <= wire else work.seconds + wire * (1 - 1 / slower)


NAMES = {  # of a step's sublayers, as `work` numbers them
    (0,): "attention",
    (1,): "mlp",
    (0, 1): "joint",
    (1, 2): "mlp",
    (2,): "shared expert",
    (3,): "mlp",
    (0, 3): "joint",
}


def play(
    steps: Iterable[Step], *, work: Callable[[Step], Work], all_reduce: float, contention: float, window: float = 1.0
) -> Timeline:
    """The timeline of a topology's steps, of all layers.

    work(step): the time of the step's `sublayers` without communication. all_reduce: seconds of one all-reduce.
    contention: as in `Machine`. window: the share of a step's time, its last, that a hidden all-reduce has.
    """
    player = _Player(all_reduce, contention, window)
    for step in steps:
        if early := getattr(step, "early", ()):
            player.take_early(early, work(dataclasses.replace(step, sublayers=early)))
        player.take(step, work(step))
    return player.finish()


def play_in_turn(
    steps: Iterable[Step],
    *,
    work: Callable[[Step, int], Work],
    all_reduces: tuple[float, float],
    contention: float,
    window: float = 1.0,
) -> Timeline:
    """The timeline of two halves of a batch in turn (`residual.interleave`), of all layers.

    While the newest output of one half is reduced, the other half computes its step; the next turn waits for both. So
    delays make no difference. work(step, half): as in `play`, of half 0 or 1. all_reduces: seconds of each half's.
    """
    now = compute = pending = 0.0
    bars = []
    for step, half in itertools.product(steps, (0, 1)):
        own = work(step, half)
        issued = now + own.share(1 - window).seconds
        computed = issued + beside(own.share(window), wire=pending, contention=contention)
        bars.append(Bar(NAMES[step.sublayers], now, computed, wire=False))
        if pending:
            bars.append(Bar("all-reduce", issued, issued + pending, wire=True))
        now = max(computed, issued + pending)
        compute += own.seconds
        pending = all_reduces[half]
    if pending:
        bars.append(Bar("last", now, now + pending, wire=True))
    wires = [bar for bar in bars if bar.wire]
    return Timeline(
        seconds=now + pending,
        compute=compute,
        wire=sum(bar.stop - bar.start for bar in wires),
        all_reduces=len(wires),
        bars=tuple(sorted(bars, key=lambda bar: bar.start)),
    )


class _Player:
    """The state of `residual.State`, with a time in place of each array.

    residual, sums: when they are reduced. partial: when it has been computed; None if it is zero.
    """

    def __init__(self, all_reduce: float, contention: float, window: float):
        self.all_reduce, self.contention, self.window = all_reduce, contention, window
        self.now = self.wire_free = self.residual = self.compute = 0.0
        self.sums: list[float] = []
        self.partial: float | None = None
        self.bars: list[Bar] = []

    def take_early(self, sublayers: tuple[int, ...], work: Work) -> None:
        """What a step computes first, of the stream as it is, and reduces with the newest output."""
        start = max(self.now, self.residual)
        self.now = start + beside(work, wire=max(0.0, self.wire_free - start), contention=self.contention)
        self.partial = self.now
        self.compute += work.seconds
        self.bars.append(Bar(NAMES[sublayers], start, self.now, wire=False))

    def take(self, step: Step, work: Work) -> None:
        issued = self._issued(step, work)
        launched = self._launch_pending(step, issued)
        # Before the first layers some sums are zero. `sums` omits them, so it may be shorter than `pending_before`.
        needed = launched[: max(0, len(launched) - step.delay)]
        self._compute(step, work, ready=max([self.residual, *needed]), issued=issued)
        if not isinstance(step, Desynced | Silent):
            self._update_state(step, launched)
        elif step.reduces:
            self.residual = self._reduce("sync", self.now)

    def finish(self) -> Timeline:
        """As `residual.flush`: reduce and add all pending outputs."""
        last = [] if self.partial is None else [self._reduce("last", self.partial)]
        seconds = max([self.now, self.residual, *self.sums, *last])
        wires = [bar for bar in self.bars if bar.wire]
        return Timeline(
            seconds=seconds,
            compute=self.compute,
            wire=sum(bar.stop - bar.start for bar in wires),
            all_reduces=len(wires),
            bars=tuple(sorted(self.bars, key=lambda bar: bar.start)),
        )

    def _issued(self, step: Step, work: Work) -> float | None:
        """When a hidden all-reduce is issued that has not the whole step for a window; None: before the step."""
        if self.window == 1 or not step.delay or self.partial is None:
            return None
        older = self.sums[: max(0, len(self.sums) + 1 - step.delay)]
        start = max([self.now, self.residual, *older])
        before = work.share(1 - self.window)
        return start + beside(before, wire=max(0.0, self.wire_free - start), contention=self.contention)

    def _launch_pending(self, step: Step, issued: float | None) -> list[float]:
        if self.partial is None:
            return self.sums
        return [*self.sums, self._reduce("all-reduce", self.partial if issued is None else issued)]

    def _update_state(self, step: Step, launched: list[float]) -> None:
        if step.pending_after == 0:
            self.residual = max([self.residual, *launched, self._reduce("all-reduce", self.now)])
            self.sums, self.partial = [], None
            return
        pending = step.pending_after - 1  # without the step's own output, which is not reduced yet
        added = launched[: max(0, len(launched) - pending)]
        self.residual = max([self.residual, *added])
        self.sums, self.partial = launched[len(added) :], self.now

    def _reduce(self, name: str, ready: float) -> float:
        start = max(ready, self.wire_free)
        self.wire_free = start + self.all_reduce
        self.bars.append(Bar(name, start, self.wire_free, wire=True))
        return self.wire_free

    def _compute(self, step: Step, work: Work, *, ready: float, issued: float | None) -> None:
        """Every all-reduce in flight was launched before this step, or in it at `issued`: from then on the link is busy
        until `wire_free`."""
        start = max(self.now, ready)
        since, rest = (start, work) if issued is None else (issued, work.share(self.window))
        self.now = since + beside(rest, wire=max(0.0, self.wire_free - since), contention=self.contention)
        self.compute += work.seconds
        self.bars.append(Bar(NAMES[step.sublayers], start, self.now, wire=False))
