"""A schedule's report in words and as a table, for a terminal and for notebooks."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ladder_jax.parallel.collectives import ENTER
from ladder_jax.terminal import Table

type Report = Any  # report.Report, which imports this module

COLUMNS = ("reduction", "layers", "bytes", "count", "status", "compute under it, in sublayers", "in cycles")
SHOWN = 20  # lines of the table in a repr; the command prints all


def verdict(report: Report) -> str:
    """How many reductions are hidden, and why the others are not; and how many all-to-alls."""
    if not report.all_to_alls:
        return _verdict(report)
    exchanged = f"{report.all_to_alls_hidden} of {report.all_to_alls} all-to-alls hidden"
    return f"{_verdict(report)}; {exchanged}" if report.all_reduces else exchanged


def _verdict(report: Report) -> str:
    reductions = [r for r in report.reductions if not r.exchanges]
    if not reductions:
        return "no all-reduces: no sublayer of this program communicates"
    noun = "all-reduces" if {r.collective.kind for r in reductions} == {"all-reduce"} else "collectives"
    line = f"{report.hidden} of {report.all_reduces} {noun} hidden"
    exposed = [r for r in reductions if r.status.name != "HIDDEN"]
    if not exposed:
        return line
    if report.merged:
        return f"{line}; {report.merged} were merged by the compiler, so no compute can hide them"
    if report.hidden == 0:
        waits = {"SYNCHRONOUS": "synchronous"}
        kinds = ", ".join(sorted({waits.get(r.status.name, "awaited where it is issued") for r in exposed}))
        return f"{line}: each is {kinds}"
    if len(exposed) == 1 and exposed[0].layer == "last" and ENTER in exposed[0].collective.op_name:
        return f"{line}; the gather of the head's input is left, which no sublayer can hide"
    if len(exposed) == 1 and exposed[0].layer == "last":
        return f"{line}; the last one comes after all compute, so it is always exposed"
    counts = Counter()
    for reduction in exposed:
        counts[reduction.status.value] += reduction.count
    return f"{line}; exposed: " + ", ".join(f"{count} {why}" for why, count in counts.items())


def table(report: Report) -> Table:
    """A row for reductions of one name, size and status."""
    groups: dict[tuple, list] = {}
    for reduction in report.reductions:
        end = "input" if ENTER in reduction.collective.op_name else "output"
        last = f"last {end}" if reduction.layer == "last" else reduction.collective.kind
        name = f"{end} of {reduction.sublayer}" if reduction.sublayer else last
        name += ", exchanged" if reduction.exchanges else ""
        name = f"gradient of the {name}" if reduction.backward else name
        groups.setdefault((name, reduction.collective.bytes, reduction.status), []).append(reduction)
    rows = []
    for (name, size, status), members in groups.items():
        cycles = [r.collective.cycles for r in members if r.collective.cycles is not None]
        rows.append((
            name,
            _layers([r.layer for r in members]),
            f"{size:,}",
            str(sum(r.count for r in members)),
            status.name.lower(),
            _range([r.window for r in members], "{:.2f}"),
            _range(cycles, "{:,}") if cycles else "-",
        ))  # fmt: skip
    return Table(COLUMNS, rows, left=("reduction", "layers", "status"))


def explained(report: Report) -> list[str]:
    """A line for each status in the table that needs one."""
    statuses = dict.fromkeys(r.status for r in report.reductions)
    return [f"{s.name.lower()}: {s.value}" for s in statuses if s.value != s.name.lower()]


def lines(report: Report, *, width: int) -> list[str]:
    """The verdict, as many of the table's rows as SHOWN lines hold, and the collectives of other purposes."""
    full = table(report)
    some = lambda count: Table(full.columns, full.rows[:count], left=full.left).lines(width)
    count = next((n for n in range(len(full.rows), 0, -1) if len(some(n)) <= SHOWN), 0)
    more = [f"... and {len(full.rows) - count} more rows"] if count < len(full.rows) else []
    others = sum(one.count for one in report.others)
    tail = [f"other collectives: {others}, {report.other_hidden} hidden"] if others else []
    body = [*some(count), *more, *explained(report)] if full.rows else []
    return [*verdict(report).split("; "), *body, *tail]


def html(report: Report) -> str:
    return f"<p>{verdict(report)}</p>{table(report).html()}<p>{'<br>'.join(explained(report))}</p>"


def _layers(names: Sequence[str]) -> str:
    numbers = sorted({int(name) for name in names if name.isdigit()})
    if len(numbers) != len(set(names)) or len(numbers) < 3:
        return ", ".join(dict.fromkeys(names))
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else f"{len(numbers)} layers of {numbers[0]}-{numbers[-1]}"


def _range(values: Sequence[float], pattern: str) -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} - {high}"
