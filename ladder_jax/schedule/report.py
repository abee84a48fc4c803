"""The report of a program's schedule: which collectives are hidden, exposed or merged, and how well
they are hidden; as JSON, in words and as a table.
"""

import dataclasses
import enum
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from ladder_jax.schedule import rings
from ladder_jax.schedule.collectives import Collective
from ladder_jax.scopes import ENTER
from ladder_jax.terminal import Table

SCHEMA = 1
"""Of the report's JSON: another number where a key is gone, or means something else."""
ENOUGH = 0.1
"""A reduction counts as hidden if its window holds at least this share of a sublayer's matmul
FLOPs.

The share is small because XLA issues a collective as late as its cost model allows: a window is
often one matmul.
"""
COLUMNS = ("reduction", "layers", "bytes", "count", "status", "compute under it, in sublayers")
FIGURES = (
    "all_reduces",
    "asynchronous",
    "hidden",
    "merged",
    "exposed",
    "all_to_alls",
    "all_to_alls_hidden",
    "window_flops_fraction",
    "hidden_time_fraction",
    "step_cycles",
    "hidden_cycles",
    "flops",
    "verdict",
)
"""Of a report's JSON, by the names of its attributes."""
OF_EACH = (
    "kind",
    "bytes",
    "axes",
    "executions",
    "operations",
    "kernels",
    "cycles",
    "op_name",
    "synchronous",
)
"""Of a collective's, likewise."""
SHOWN = 10  # rows of the table in a repr; the command prints all


class Status(enum.Enum):
    HIDDEN = "hidden"
    EXPOSED = "beside too little compute"
    SYNCHRONOUS = "synchronous"
    MERGED = "merged with another"


class Role(enum.Enum):
    """What a collective is for."""

    # a sublayer's all-reduce over the tensor axis, or half of one, or a reduction of a user's
    # program; merged ones are not hidden, because the first waits for the second
    REDUCTION = enum.auto()
    # gathers a layer's weights over the fsdp axis, or reduce-scatters their gradients; a compiler
    # may merge those of one layer, which hides them as well, in fewer messages
    SHARDS = enum.auto()
    # of the embedding, the loss, the gradients, the choice of the token; merging does no harm
    OTHER = enum.auto()


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective, judged.

    layer: number of the layer, "3"; "0-79" for a loop over layers; "" if the program does not name
        it.
    sublayer: the sublayer whose output is reduced (forward) or whose input's gradient is reduced
        (backward). Under sequence parallelism also the sublayer whose input is gathered, or whose
        output's gradient is gathered.
    backward: whether it is in the backward pass.
    window: matmuls in its window, in sublayers: the FLOPs of each matmul over those of its sublayer
        (in the backward pass over twice those, for gradients of inputs and of weights).
    purpose: of no other role, a phrase (see `judge.purpose`).
    """

    collective: Collective
    role: Role
    layer: str
    sublayer: str
    backward: bool
    window: float
    purpose: str = ""

    @property
    def count(self) -> int:
        """Number of arrays that it moves in one execution of the program; of OTHER, of messages."""
        arrays = 1 if self.role is Role.OTHER else self.collective.operands
        return self.collective.executions * arrays

    @property
    def exchanges(self) -> bool:
        """Whether it is no reduction but an all-to-all, of experts' rows."""
        return self.collective.kind == "all-to-all"

    @property
    def status(self) -> Status:
        if self.role is Role.REDUCTION and self.collective.operands > 1:
            return Status.MERGED
        if self.collective.synchronous:
            return Status.SYNCHRONOUS
        if self.collective.permutes:
            covered = rings.covered(self.collective)
        else:
            covered = self.window >= ENOUGH
        return Status.HIDDEN if covered else Status.EXPOSED

    @property
    def hidden(self) -> bool:
        return self.status is Status.HIDDEN

    @property
    def title(self) -> str:
        end = "input" if ENTER in self.collective.op_name else "output"
        last = f"last {end}" if self.layer == "last" else self.collective.kind
        name = f"{end} of {self.sublayer}" if self.sublayer else last
        name += ", exchanged" if self.exchanges else ""
        return f"gradient of the {name}" if self.backward else name

    def as_dict(self, **more: str | int) -> dict:
        return {
            **more,
            "direction": "backward" if self.backward else "forward",
            "status": self.status.name.lower(),
            "window_flops_fraction": self.window,
            **{name: getattr(self.collective, name) for name in OF_EACH},
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of a program, by class.

    reductions: of the sublayers, or all reductions of a user's program; and all-to-alls, which are
        counted apart.
    others: all collectives of no other class.
    step_cycles: the compiler's estimate of the whole program's compute; None if it gives none
        (GPU, CPU).
    hidden_cycles: its estimate of the compute in windows of hidden reductions; None likewise.
    gathers, scatters: of the layers' weights and of their gradients, if they are sharded over the
        fsdp axis.
    flops: of all matmuls that one execution computes on a device, without kernels of attention; of
        a program that generates several tokens, per token.
    unknown: names of collectives in a form that this reader does not know. They are counted
        nowhere.
    """

    reductions: tuple[Transfer, ...]
    others: tuple[Transfer, ...]
    step_cycles: int | None
    hidden_cycles: int | None
    gathers: tuple[Transfer, ...] = ()
    scatters: tuple[Transfer, ...] = ()
    flops: int = 0
    unknown: tuple[str, ...] = ()

    def __repr__(self) -> str:
        table = self.table()
        rows = dataclasses.replace(table, rows=table.rows[:SHOWN]).lines(80) if table.rows else []
        more = len(table.rows) - SHOWN
        cut = [f"... and {more} more rows"] if more > 0 else []
        return "\n".join([*self.verdict.split("; "), *rows, *cut])

    def as_dict(self) -> dict:
        """Plain JSON values. bytes, cycles, FLOPs of one device; None is what a compiler leaves
        out.
        """
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in FIGURES},
            "reductions": [
                one.as_dict(layer=one.layer, sublayer=one.sublayer) for one in self.reductions
            ],
            "weights_gathers": _transfers(self.gathers),
            "gradients_scatters": _transfers(self.scatters),
            "other_collectives": [
                one.as_dict(**{"for": one.purpose, "count": one.count}) for one in self.others
            ],
            "other_hidden": self.other_hidden,
            "unknown_collectives": list(self.unknown),
        }

    @property
    def all_reduces(self) -> int:
        return _count(self._reduced)

    @property
    def asynchronous(self) -> int:
        return _asynchronous(self._reduced)

    @property
    def all_to_alls(self) -> int:
        return _count(self.reductions) - self.all_reduces

    @property
    def all_to_alls_hidden(self) -> int:
        return hidden(self.reductions) - self.hidden

    @property
    def hidden(self) -> int:
        return hidden(self._reduced)

    @property
    def merged(self) -> int:
        return _count(one for one in self._reduced if one.status is Status.MERGED)

    @property
    def exposed(self) -> int:
        return self.all_reduces - self.hidden

    @property
    def window_flops_fraction(self) -> dict[str, float] | None:
        """Least and median window of the hidden reductions, in sublayers' matmul FLOPs; None if
        none is hidden.
        """
        windows = [r.window for r in self.reductions if r.hidden for _ in range(r.count)]
        return {"least": min(windows), "median": statistics.median(windows)} if windows else None

    @property
    def hidden_time_fraction(self) -> float | None:
        """The share of the step's estimated compute time during which a hidden reduction is in
        flight.
        """
        return self.hidden_cycles / self.step_cycles if self.step_cycles else None

    @property
    def other_hidden(self) -> int:
        return hidden(self.others)

    @property
    def _reduced(self) -> list[Transfer]:
        return [r for r in self.reductions if not r.exchanges]

    @property
    def verdict(self) -> str:
        """How many reductions are hidden, and why the others are not; and how many all-to-alls."""
        parts = [self._verdict] if self.all_reduces or not self.all_to_alls else []
        if self.all_to_alls:
            parts.append(f"{self.all_to_alls_hidden} of {self.all_to_alls} all-to-alls hidden")
        if self.unknown:
            parts.append(f"NOT counted, as their form is unknown: {', '.join(self.unknown)}")
        return "; ".join(parts)

    @property
    def _verdict(self) -> str:
        if not self._reduced:
            count = _count(self.others)
            others = f"; {self.other_hidden} of {count} other collectives hidden" if count else ""
            return f"no all-reduces{others}"
        noun = (
            "all-reduces"
            if {r.collective.kind for r in self._reduced} == {"all-reduce"}
            else "collectives"
        )
        line = f"{self.hidden} of {self.all_reduces} {noun} hidden"
        exposed = [r for r in self._reduced if not r.hidden]
        if not exposed:
            return line
        if self.merged:
            return f"{line}; {self.merged} were merged by the compiler, so no compute can hide them"
        if len(exposed) == 1 and exposed[0].layer == "last":
            if ENTER in exposed[0].collective.op_name:
                return f"{line}; the gather of the head's input is left, which no sublayer can hide"
            return f"{line}; the last one comes after all compute, so it is always exposed"
        counts = Counter()
        for reduction in exposed:
            counts[reduction.status.value] += reduction.count
        return f"{line}; exposed: " + ", ".join(f"{count} {why}" for why, count in counts.items())

    def table(self) -> Table:
        """A row for reductions of one name, size and status."""
        groups: dict[tuple[str, str, str], list[Transfer]] = {}
        for one in self.reductions:
            alike = one.title, f"{one.collective.bytes:,}", one.status.name.lower()
            groups.setdefault(alike, []).append(one)
        rows = []
        for (title, size, status), members in groups.items():
            layers = layer_range([one.layer for one in members])
            windows = [one.window for one in members]
            ends = dict.fromkeys(f"{end:.2f}" for end in (min(windows), max(windows)))
            rows.append((title, layers, size, str(_count(members)), status, " - ".join(ends)))
        return Table(COLUMNS, rows, left=("reduction", "layers", "status"))


def _count(transfers: Iterable[Transfer]) -> int:
    return sum(t.count for t in transfers)


def _asynchronous(transfers: Sequence[Transfer]) -> int:
    return _count(t for t in transfers if not t.collective.synchronous)


def hidden(transfers: Sequence[Transfer]) -> int:
    """The number of hidden arrays (of OTHER: messages)."""
    return _count(t for t in transfers if t.hidden)


def hidden_bytes(transfers: Sequence[Transfer]) -> float | None:
    """The share of the transfers' bytes that is hidden; None without transfers."""
    if not transfers:
        return None
    moved = lambda group: sum(t.collective.executions * t.collective.bytes for t in group)
    return moved(t for t in transfers if t.hidden) / moved(transfers)


def _transfers(transfers: Sequence[Transfer]) -> dict:
    """Of the layers' weights or gradients as JSON. The counts are of arrays.

    hidden_bytes_fraction: the share of their bytes that is hidden, None without transfers.
    """
    return {
        "count": _count(transfers),
        "asynchronous": _asynchronous(transfers),
        "hidden": hidden(transfers),
        "hidden_bytes_fraction": hidden_bytes(transfers),
        "each": [one.as_dict(layer=one.layer, arrays=one.count) for one in transfers],
    }


def layer_range(names: Sequence[str]) -> str:
    """Consecutive layers as "0-3", others one by one."""
    each = sorted({int(name) for name in names if name.isdigit()})
    if len(each) > 2 and len(each) == len(set(names)) and each[-1] - each[0] == len(each) - 1:
        return f"{each[0]}-{each[-1]}"
    return ", ".join(dict.fromkeys(names))
