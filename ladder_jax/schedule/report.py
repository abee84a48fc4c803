"""What a program's schedule says about its communication: hidden, exposed or merged, and how well hidden."""

import dataclasses
import enum
import statistics
from collections.abc import Sequence

from ladder_jax.schedule.collectives import Collective

ENOUGH = 0.1
"""A reduction counts as hidden if its window holds this share of a sublayer's matmul FLOPs.

XLA issues a collective as late as it believes is enough, so one matmul of a sublayer is often all there is.
"""


class Status(enum.Enum):
    HIDDEN = "hidden"
    EXPOSED = "asynchronous, too little inside"
    SYNCHRONOUS = "synchronous"
    MERGED = "merged with another"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Weights of a layer gathered over the fsdp axis, or their gradients reduce-scattered.

    layer: whose weights they are, "3", or "0-79" for a loop over them; "" where the program does not say. A compiler
        may join several arrays of one layer: fewer messages, as well hidden.
    backward: it stands in the backward pass.
    window: matmul FLOPs in its window, in sublayers: each matmul is measured against the sublayer it
        belongs to (backward, against twice that: gradients of inputs and of weights).
    """

    collective: Collective
    layer: str
    backward: bool
    window: float

    @property
    def count(self) -> int:
        """Arrays in one execution of the program."""
        return self.collective.executions * self.collective.operands

    @property
    def status(self) -> Status:
        if self.collective.synchronous:
            return Status.SYNCHRONOUS
        return Status.HIDDEN if self.window >= ENOUGH else Status.EXPOSED


@dataclasses.dataclass(frozen=True)
class Reduction(Transfer):
    """A sublayer's all-reduce over the tensor axis or a half of it, or a reduction of a user's program.

    sublayer: whose output is reduced forward, the gradient of whose input backward. With sequence parallelism
        also whose input is gathered forward, the gradient of whose output backward.
    The rest is as in `Transfer`, but that two of them must not be joined: the first would wait for the second.
    """

    sublayer: str

    @property
    def status(self) -> Status:
        return Status.MERGED if self.collective.operands > 1 else super().status


@dataclasses.dataclass(frozen=True)
class Other(Transfer):
    """What is no sublayer's: the embedding's, the loss's, the gradients', the choice of the token.

    purpose: in words. `count` is of messages, as a compiler may join arrays of what nothing has to hide.
    """

    purpose: str

    @property
    def count(self) -> int:
        return self.collective.executions


@dataclasses.dataclass(frozen=True)
class Report:
    """reductions: what was asked about; others: all else that communicates.

    gathers, scatters: of the layers' weights and their gradients, where they are split over the fsdp axis.

    step_cycles: the compiler's estimate of the whole program's compute; hidden_cycles: of the compute
    inside the windows of hidden reductions. None where it gives none (GPU, CPU).
    """

    reductions: tuple[Reduction, ...]
    others: tuple[Other, ...]
    step_cycles: int | None
    hidden_cycles: int | None
    gathers: tuple[Transfer, ...] = ()
    scatters: tuple[Transfer, ...] = ()

    @property
    def all_reduces(self) -> int:
        return sum(r.count for r in self.reductions)

    @property
    def asynchronous(self) -> int:
        return sum(r.count for r in self.reductions if not r.collective.synchronous)

    @property
    def hidden(self) -> int:
        return self._count(Status.HIDDEN)

    @property
    def merged(self) -> int:
        return self._count(Status.MERGED)

    @property
    def exposed(self) -> int:
        return self.all_reduces - self.hidden

    @property
    def window_flops_fraction(self) -> dict[str, float] | None:
        """Of the hidden ones: how much of a sublayer's matmul FLOPs each window holds."""
        windows = [r.window for r in self.reductions if r.status is Status.HIDDEN for _ in range(r.count)]
        return {"least": min(windows), "median": statistics.median(windows)} if windows else None

    @property
    def hidden_time_fraction(self) -> float | None:
        """The share of the step's estimated compute time during which a hidden reduction is in flight."""
        return self.hidden_cycles / self.step_cycles if self.step_cycles else None

    @property
    def other_hidden(self) -> int:
        return hidden(self.others)

    def _count(self, status: Status) -> int:
        return sum(r.count for r in self.reductions if r.status is status)


def hidden(found: Sequence[Transfer]) -> int:
    """How many of the arrays."""
    return sum(t.count for t in found if t.status is Status.HIDDEN)


def hidden_bytes(found: Sequence[Transfer]) -> float | None:
    """The share of their bytes that is hidden, None where none is moved."""
    moved = lambda these: sum(t.collective.executions * t.collective.bytes for t in these)
    return moved(t for t in found if t.status is Status.HIDDEN) / moved(found) if found else None
