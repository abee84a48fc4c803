"""The report of a program's schedule: which collectives are hidden, exposed or merged, and how well they are hidden."""

import dataclasses
import enum
import statistics
from collections.abc import Sequence

from ladder_jax.schedule import text
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.rings import Ring

ENOUGH = 0.1
"""A reduction counts as hidden if its window holds at least this share of a sublayer's matmul FLOPs.

The share is small because XLA issues a collective as late as its cost model allows: a window is often one matmul.
"""


class Status(enum.Enum):
    HIDDEN = "hidden"
    EXPOSED = "started early, but no compute stands under it"
    SYNCHRONOUS = "synchronous"
    MERGED = "merged with another"


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A gather of a layer's weights over the fsdp axis, or a reduce-scatter of their gradients.

    A compiler may merge transfers of several arrays of one layer; that hides them as well, in fewer messages.

    layer: number of the layer, "3"; "0-79" for a loop over layers; "" if the program does not name it.
    backward: whether it is in the backward pass.
    window: matmuls in its window, in sublayers: the FLOPs of each matmul over those of its sublayer (in the backward
        pass over twice those, for gradients of inputs and of weights).
    """

    collective: Collective
    layer: str
    backward: bool
    window: float

    @property
    def count(self) -> int:
        """Number of arrays that it moves in one execution of the program."""
        return self.collective.executions * self.collective.operands

    @property
    def status(self) -> Status:
        if self.collective.synchronous:
            return Status.SYNCHRONOUS
        covered = self.collective.covered if isinstance(self.collective, Ring) else self.window >= ENOUGH
        return Status.HIDDEN if covered else Status.EXPOSED


@dataclasses.dataclass(frozen=True)
class Reduction(Transfer):
    """A sublayer's all-reduce over the tensor axis, or half of one, or a reduction of a user's program.

    Other fields as in `Transfer`; but merged reductions are not hidden, because the first waits for the second.

    sublayer: the sublayer whose output is reduced (forward) or whose input's gradient is reduced (backward). Under
        sequence parallelism also the sublayer whose input is gathered, or whose output's gradient is gathered.
    """

    sublayer: str

    @property
    def exchanges(self) -> bool:
        """Whether it is no reduction but an all-to-all, of experts' rows."""
        return self.collective.kind == "all-to-all"

    @property
    def status(self) -> Status:
        return Status.MERGED if self.collective.operands > 1 else super().status


@dataclasses.dataclass(frozen=True)
class Other(Transfer):
    """Any other collective: of the embedding, the loss, the gradients, the choice of the token.

    `count` counts messages, not arrays: merging these collectives does no harm.

    purpose: a phrase (see `purposes.purpose`).
    """

    purpose: str

    @property
    def count(self) -> int:
        return self.collective.executions


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of a program, by class.

    reductions: of the sublayers, or all reductions of a user's program; and all-to-alls, which are counted apart.
    others: all collectives of no other class.
    step_cycles: the compiler's estimate of the whole program's compute; None if it gives none (GPU, CPU).
    hidden_cycles: its estimate of the compute in windows of hidden reductions; None likewise.
    gathers, scatters: of the layers' weights and of their gradients, if they are sharded over the fsdp axis.
    flops: of all matmuls that one execution computes on a device, without kernels of attention; of a program that
        generates several tokens, per token.
    """

    reductions: tuple[Reduction, ...]
    others: tuple[Other, ...]
    step_cycles: int | None
    hidden_cycles: int | None
    gathers: tuple[Transfer, ...] = ()
    scatters: tuple[Transfer, ...] = ()
    flops: int = 0

    def __repr__(self) -> str:
        return "\n".join(text.lines(self, width=80))

    def _repr_html_(self) -> str:
        return text.html(self)

    @property
    def verdict(self) -> str:
        """How many reductions are hidden, and why the others are not."""
        return text.verdict(self)

    @property
    def all_reduces(self) -> int:
        return sum(r.count for r in self.reductions if not r.exchanges)

    @property
    def asynchronous(self) -> int:
        return sum(r.count for r in self.reductions if not r.exchanges and not r.collective.synchronous)

    @property
    def all_to_alls(self) -> int:
        return sum(r.count for r in self.reductions if r.exchanges)

    @property
    def all_to_alls_hidden(self) -> int:
        return hidden([r for r in self.reductions if r.exchanges])

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
        """Least and median window of the hidden reductions, in sublayers' matmul FLOPs; None if none is hidden."""
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
        return sum(r.count for r in self.reductions if not r.exchanges and r.status is status)


def hidden(transfers: Sequence[Transfer]) -> int:
    """The number of hidden arrays (of `Other`s: messages)."""
    return sum(t.count for t in transfers if t.status is Status.HIDDEN)


def hidden_bytes(transfers: Sequence[Transfer]) -> float | None:
    """The share of the transfers' bytes that is hidden; None without transfers."""
    moved = lambda group: sum(t.collective.executions * t.collective.bytes for t in group)
    return moved(t for t in transfers if t.status is Status.HIDDEN) / moved(transfers) if transfers else None
