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
class Timeline:
    """seconds: until the last transfer ends. compute: of the steps without communication. wire: of
    the transfers.
    """

    seconds: float
    compute: float
    wire: float
    all_reduces: int

    @property
    def exposed(self) -> float:
        """Seconds that communication adds: by waiting, and by contention with compute. Both sums are
        rounded.
        """
        return max(0.0, self.seconds - self.compute)


class Device:
    """A device and its link. now: when its last compute or wait ends. free: when the link's last
    transfer arrives. wires: seconds of each transfer.

    contention: as in `Machine`.
    """

    def __init__(self, contention: float):
        self.contention = contention
        self.wires = []
        self.now = self.free = self.computed = 0.0

    def send(self, seconds: float) -> float:
        """Issue a transfer of so many seconds now. Returns when it arrives."""
        self.free = max(self.now, self.free) + seconds
        self.wires.append(seconds)
        return self.free

    def wait(self, *arrivals: float) -> None:
        self.now = max([self.now, *arrivals])

    def compute(
        self, work: Work, *, transfers: Sequence[float] = (), window: float = 1.0
    ) -> list[float]:
        """Compute, and issue transfers where the last share `window` of `work` begins. Returns when
        they arrive.
        """
        arrivals = []
        window = window if transfers else 1.0
        for share, issued in ((1 - window, ()), (window, transfers)):
            arrivals += map(self.send, issued)
            wire = max(0.0, self.free - self.now)
            self.now += beside(work.share(share), wire=wire, contention=self.contention)
        self.computed += work.seconds
        return arrivals

    def timeline(self) -> Timeline:
        seconds = max(self.now, self.free)
        return Timeline(seconds, self.computed, sum(self.wires), len(self.wires))


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
    work: Callable[[tuple[int, ...]], Work],
    all_reduce: float,
    contention: float,
    window: float = 1.0,
    waits: bool = False,
) -> Timeline:
    """The timeline of a topology's steps, of all layers.

    work(sublayers): the time of a step's without communication. all_reduce: seconds of one
    all-reduce. contention: as in `Machine`. window: the share of a step's time, its last, that a
    hidden all-reduce has. waits: as in `play_slots`.

    The loop is that of `residual.State`, with the time at which a sum is reduced in place of each
    array. A sum that is zero, before the first layers, has no place in `sums`, so there may be
    fewer than `Step.pending_before`.
    """
    device = Device(contention)
    sums = []  # when they are whole, oldest first
    pending = False  # whether the newest output is not launched yet
    for step in steps:
        if step.early:
            device.compute(work(step.early))
            pending = True
        if pending and (waits or not step.delay):
            sums.append(device.send(all_reduce))
            pending = False
        if waits:
            device.wait(*sums)
        newest = [all_reduce] if pending else []
        device.wait(*sums[: max(0, len(sums) + len(newest) - step.delay)])
        sums += device.compute(work(step.sublayers), transfers=newest, window=window)
        if not step.reduces:
            continue
        pending = step.pending_after > 0
        if not pending:
            sums.append(device.send(all_reduce))
        added = max(0, len(sums) + pending - step.pending_after)
        device.wait(*sums[:added])
        sums = sums[added:]
    if pending:
        device.send(all_reduce)
    return device.timeline()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Compute, and transfers one after another, each of so many seconds, that begin together and
    are awaited together.
    """

    work: Work = Work()
    transfers: Sequence[float] = ()


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
        device.compute(slot.work, transfers=() if waits else slot.transfers, window=window)
        device.wait(device.free)
    return device.timeline()


def turns(
    steps: Iterable[Step],
    *,
    work: Callable[[tuple[int, ...], int], Work],
    all_reduces: Sequence[float],
) -> Iterator[Slot]:
    """The slots of two halves of a batch in turn. work(sublayers, half): as in `play`, of half 0 or 1.
    all_reduces: seconds of each half's.
    """
    newest: Sequence[float] = ()
    for step, half in itertools.product(steps, (0, 1)):
        yield Slot(work(step.sublayers, half), newest)
        newest = [all_reduces[half]]
    yield Slot(transfers=newest)
