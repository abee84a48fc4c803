"""Play a topology's steps on one device and its link: when it computes, waits, and has a transfer
in flight.

The device computes one step after another, the link carries one transfer after another. A transfer
is hidden for the time that it overlaps with compute; compute is slower meanwhile. The forms differ
in what they issue and await when:

    `play`           the order of `residual.Topology.layers`. A step leaves the newest outputs out of its input
                     (`Step.delay`), and so waits for the all-reduces of the others only
    `play_slots`     compute and transfers that begin together and are awaited together: of
                     exchanged experts, of FSDP, and of two halves of a batch
                     (`residual.interleave`). While the newest output of one half is reduced, the
                     other half computes its step; the next turn waits for both, so delays make no
                     difference
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from ladder_jax.residual import Step


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of a step without communication. busy: memory or matrix units work. idle: between
    kernels.
    """

    busy: float = 0.0
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        return self.busy + self.idle

    def __add__(self, other: "Work") -> "Work":
        return Work(self.busy + other.busy, self.idle + other.idle)

    def slower(self, factor: float) -> "Work":
        return Work(factor * self.busy, self.idle)

    def share(self, share: float) -> "Work":
        return Work(share * self.busy, share * self.idle)


@dataclasses.dataclass(frozen=True)
class Bar:
    """start, stop: seconds since the start of the first step. wire: whether it is a transfer, not
    compute.
    """

    name: str
    start: float
    stop: float
    wire: bool


@dataclasses.dataclass(frozen=True)
class Timeline:
    """seconds: until the last transfer ends. compute: of the steps without communication. wire: of
    the transfers.
    """

    seconds: float
    compute: float
    wire: float
    all_reduces: int
    bars: tuple[Bar, ...] = dataclasses.field(repr=False)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds: by waiting, and by contention with compute."""
        return self.seconds - self.compute


Transfer = tuple[str, float]  # its name and seconds

NAMES = {  # of a step's sublayers, as `work` numbers them
    (0,): "attention",
    (1,): "mlp",
    (0, 1): "joint",
    (1, 2): "mlp",
    (2,): "shared expert",
    (3,): "mlp",
    (0, 3): "joint",
}


class Device:
    """A device and its link. now: when its last compute or wait ends. free: when the link's last
    transfer arrives.

    contention: as in `Machine`.
    """

    def __init__(self, contention: float):
        self.contention = contention
        self.bars = []
        self.now = self.free = self.computed = 0.0

    def send(self, transfer: Transfer) -> float:
        """Issue it now. Returns when it arrives."""
        name, seconds = transfer
        start = max(self.now, self.free)
        self.free = start + seconds
        self.bars.append(Bar(name, start, self.free, wire=True))
        return self.free

    def wait(self, *arrivals: float) -> None:
        self.now = max([self.now, *arrivals])

    def compute(
        self, name: str, work: Work, *, beside: Sequence[Transfer] = (), window: float = 1.0
    ) -> list[float]:
        """Compute, and issue transfers where the last share `window` of `work` begins. Returns when
        they arrive.
        """
        start = self.now
        late = beside and window < 1
        if late:
            self._work(work.share(1 - window))
        arrivals = [self.send(one) for one in beside]
        self._work(work.share(window) if late else work)
        self.computed += work.seconds
        if work.seconds:
            self.bars.append(Bar(name, start, self.now, wire=False))
        return arrivals

    def _work(self, work: Work) -> None:
        self.now += beside(work, wire=max(0.0, self.free - self.now), contention=self.contention)

    def timeline(self) -> Timeline:
        wires = [bar.stop - bar.start for bar in self.bars if bar.wire]
        bars = tuple(sorted(self.bars, key=lambda bar: bar.start))
        return Timeline(max(self.now, self.free), self.computed, sum(wires), len(wires), bars)


def beside(work: Work, *, wire: float, contention: float) -> float:
    """Seconds of `work` that begins together with a transfer of `wire` seconds: slower while that
    is in flight.
    """
    slower = 1 + contention * work.busy / work.seconds if work.seconds else 1.0
    length = work.seconds * slower
    return length if length <= wire else work.seconds + wire * (1 - 1 / slower)


def play(
    steps: Iterable[Step],
    *,
    work: Callable[[Step], Work],
    all_reduce: float,
    contention: float,
    window: float = 1.0,
) -> Timeline:
    """The timeline of a topology's steps, of all layers.

    work(step): the time of the step's `sublayers` without communication. all_reduce: seconds of one
    all-reduce. contention: as in `Machine`. window: the share of a step's time, its last, that a
    hidden all-reduce has.

    The loop is that of `residual.State`, with the time at which a sum is reduced in place of each
    array. A sum that is zero, before the first layers, has no place in `sums`, so there may be
    fewer than `Step.pending_before`.
    """
    device = Device(contention)
    transfer = ("all-reduce", all_reduce)
    sums = []  # when they are whole, oldest first
    pending = False  # whether the newest output is not launched yet
    for step in steps:
        if step.early:
            device.compute(NAMES[step.early], work(dataclasses.replace(step, sublayers=step.early)))
            pending = True
        if pending and not step.delay:
            sums.append(device.send(transfer))
            pending = False
        newest = [transfer] if pending else []
        device.wait(*sums[: max(0, len(sums) + len(newest) - step.delay)])
        sums += device.compute(NAMES[step.sublayers], work(step), beside=newest, window=window)
        if not step.reduces:
            continue
        pending = step.pending_after > 0
        if not pending:
            sums.append(device.send(transfer))
        added = max(0, len(sums) + pending - step.pending_after)
        device.wait(*sums[:added])
        sums = sums[added:]
    if pending:
        device.send(transfer)
    return device.timeline()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Compute, and transfers one after another, that begin together and are awaited together."""

    work: Work = Work()
    transfers: Sequence[Transfer] = ()


def play_slots(
    slots: Iterable[Slot], *, contention: float, window: float = 1.0, waits: bool = False
) -> Timeline:
    """window: as in `play`. waits: a compiler cannot launch transfers apart, so that each is
    awaited before compute.
    """
    device = Device(contention)
    for slot in slots:
        if waits:
            device.wait(*map(device.send, slot.transfers))
        device.compute("slot", slot.work, beside=() if waits else slot.transfers, window=window)
        device.wait(device.free)
    return device.timeline()


def turns(
    steps: Iterable[Step], *, work: Callable[[Step, int], Work], all_reduces: tuple[float, float]
) -> Iterator[Slot]:
    """The slots of two halves of a batch in turn. work(step, half): as in `play`, of half 0 or 1.
    all_reduces: seconds of each half's.
    """
    newest: Sequence[Transfer] = ()
    for step, half in itertools.product(steps, (0, 1)):
        yield Slot(work(step, half), newest)
        newest = [("all-reduce", all_reduces[half])]
    yield Slot(transfers=newest)
