"""The result of `ladder-jax overlap` for a terminal: the verdict, a table, memory and traffic."""

from collections import Counter
from collections.abc import Sequence

from ladder_jax.config import Phase
from ladder_jax.overlap.result import Result
from ladder_jax.parallel.collectives import ENTER
from ladder_jax.schedule.report import Reduction, Report, Status, Transfer, hidden, hidden_bytes


def lines(answer: Result) -> list:
    """Lines and tables, for rich to print."""
    request, record = answer.request, answer.record
    title = f"{request.model}, {request.residual}, {request.phase.value}, {request.layers} layers"
    mesh = (f"fsdp {request.fsdp}, " if request.fsdp > 1 else "") + f"tensor {request.tensor}"
    split = ", sequence-parallel" if request.sequence_parallel else ""
    head = [answer.verdict, f"{title}, {mesh}{split}, {request.loop.value}, on {request.target.name}", ""]
    tail = [""]
    if record.bytes_per_device is not None:
        memory = f"{record.bytes_per_device / 2**30:.1f} GiB a device"
        if answer.fits is not None:
            room = request.target.memory / 2**30
            memory += f", of {room:.0f}: it fits" if answer.fits else f", more than its {room:.0f}: it does NOT fit"
        parts = [("arguments", record.argument_bytes), ("temporaries", record.temporary_bytes)]
        split = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
        tail.append(f"memory    {memory} ({split})")
    traffic_line = f"moves     {answer.bytes_accessed / 2**30:.2f} GiB through the device's memory"
    if record.bytes_minimum:
        traffic_line += f", {answer.bytes_accessed / record.bytes_minimum:.2f} x the weights and cache once"
    tail.append(traffic_line)
    if answer.report.hidden_time_fraction is not None:
        share = f"{answer.report.hidden_time_fraction:.0%} of the step's estimated compute"
        tail.append(f"time      a hidden reduction is in flight during {share}")
    for name, transfers in (("gathers", answer.report.gathers), ("scatters", answer.report.scatters)):
        if transfers:
            tail.append(f"{name:<10}{_transfer_line(transfers)}")
    if answer.report.others:
        others = answer.report.others
        kinds = ", ".join(dict.fromkeys(part for one in others for part in one.purpose.split(", ")))
        count, hidden_count = sum(one.count for one in others), answer.report.other_hidden
        tail.append(f"other collectives: {count} ({kinds}), {hidden_count} hidden")
    tail.append(f"compiler  {record.compiler}, jax {record.jax}, {record.seconds:.0f} s")
    tail.append("options   " + (", ".join(f"{k}={v}" for k, v in record.options.items()) or "none"))
    tail += [f"notice    {notice}" for notice in record.notices]
    if request.target.platform == "cuda" and request.phase is not Phase.DECODE:
        tail.append("notice    attention is XLA's here: cuDNN's cannot be compiled without a GPU")
    return [*head, _table(answer.report), *tail]


def _transfer_line(transfers: Sequence[Transfer]) -> str:
    scattered = transfers[0].collective.kind == "reduce-scatter"
    arrays = "gradients reduce-scattered" if scattered else "weights gathered"
    line = f"{hidden(transfers)} of {sum(t.count for t in transfers)} arrays of layers' {arrays}, hidden"
    line += f" ({hidden_bytes(transfers):.0%} of their bytes)"
    not_hidden = Counter()
    for t in transfers:
        if t.status is not Status.HIDDEN:
            kind = f"of layer {t.layer or '?'}, {'backward' if t.backward else 'forward'}, {t.status.value}"
            not_hidden[kind] += t.count
    return line + "".join(f"; {count} {kind}" for kind, count in not_hidden.items())


def _table(report: Report):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reduction", "layers", "bytes", "count", "status", "sublayers inside", "cycles inside"):
        table.add_column(name, justify="left" if name in ("reduction", "layers", "status") else "right")
    groups: dict[tuple, list[Reduction]] = {}
    for reduction in report.reductions:
        end = "input" if ENTER in reduction.collective.op_name else "output"
        name = f"{end} of {reduction.sublayer}" if reduction.sublayer else f"last {end}"
        name = f"gradient of the {name}" if reduction.backward else name
        groups.setdefault((name, reduction.collective.bytes, reduction.status), []).append(reduction)
    for (name, size, status), members in groups.items():
        cycles = [r.collective.cycles for r in members if r.collective.cycles is not None]
        table.add_row(
            name,
            _layers([r.layer for r in members]),
            f"{size:,}",
            str(sum(r.count for r in members)),
            status.value,
            _range([r.window for r in members], "{:.2f}"),
            _range(cycles, "{:,}") if cycles else "-",
        )
    return table


def _layers(names: list[str]) -> str:
    numbers = sorted({int(name) for name in names if name.isdigit()})
    if len(numbers) != len(set(names)) or len(numbers) < 3:
        return ", ".join(dict.fromkeys(names))
    consecutive = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if consecutive else f"{len(numbers)} layers of {numbers[0]}-{numbers[-1]}"


def _range(values: list, pattern: str) -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} - {high}"
