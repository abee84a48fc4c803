"""The answer of `ladder-jax overlap` for a terminal: the verdict, a table, what it takes and moves."""

from collections import Counter
from collections.abc import Sequence

from ladder_jax.config import Phase
from ladder_jax.overlap.result import Result
from ladder_jax.parallel.collectives import ENTER
from ladder_jax.schedule.report import Reduction, Report, Status, Transfer, hidden, hidden_bytes


def lines(answer: Result) -> list:
    """Lines and tables, to be printed by rich."""
    request, record = answer.request, answer.record
    what = f"{request.model}, {request.residual}, {request.phase.value}, {request.layers} layers"
    mesh = (f"fsdp {request.fsdp}, " if request.fsdp > 1 else "") + f"tensor {request.tensor}"
    split = ", sequence-parallel" if request.sequence_parallel else ""
    head = [answer.verdict, f"{what}, {mesh}{split}, {request.loop.value}, on {request.target.name}", ""]
    tail = [""]
    if record.bytes_per_device is not None:
        memory = f"{record.bytes_per_device / 2**30:.1f} GiB a device"
        if answer.fits is not None:
            room = request.target.memory / 2**30
            memory += f", of {room:.0f}: it fits" if answer.fits else f", more than its {room:.0f}: it does NOT fit"
        parts = [("arguments", record.argument_bytes), ("temporaries", record.temporary_bytes)]
        split = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
        tail.append(f"memory    {memory} ({split})")
    moved = f"moves     {answer.bytes_accessed / 2**30:.2f} GiB through the device's memory"
    if record.bytes_minimum:
        moved += f", {answer.bytes_accessed / record.bytes_minimum:.2f} x the weights and cache once"
    tail.append(moved)
    if answer.report.hidden_time_fraction is not None:
        share = f"{answer.report.hidden_time_fraction:.0%} of the step's estimated compute"
        tail.append(f"time      a hidden reduction is in flight during {share}")
    for name, transfers in (("gathers", answer.report.gathers), ("scatters", answer.report.scatters)):
        if transfers:
            tail.append(f"{name:<10}{_in_words(transfers)}")
    if answer.report.others:
        others = answer.report.others
        kinds = ", ".join(dict.fromkeys(part for one in others for part in one.purpose.split(", ")))
        count, unseen = sum(one.count for one in others), answer.report.other_hidden
        tail.append(f"other collectives: {count} ({kinds}), {unseen} hidden")
    tail.append(f"compiler  {record.compiler}, jax {record.jax}, {record.seconds:.0f} s")
    tail.append("options   " + (", ".join(f"{k}={v}" for k, v in record.options.items()) or "none"))
    tail += [f"notice    {notice}" for notice in record.notices]
    if request.target.platform == "cuda" and request.phase is not Phase.DECODE:
        tail.append("notice    attention is XLA's here: cuDNN's cannot be compiled without a GPU")
    return [*head, _table(answer.report), *tail]


def _in_words(found: Sequence[Transfer]) -> str:
    what = "gradients reduce-scattered" if found[0].collective.kind == "reduce-scatter" else "weights gathered"
    line = f"{hidden(found)} of {sum(t.count for t in found)} arrays of layers' {what}, hidden"
    line += f" ({hidden_bytes(found):.0%} of their bytes)"
    left = Counter()
    for t in found:
        if t.status is not Status.HIDDEN:
            left[f"of layer {t.layer or '?'}, {'backward' if t.backward else 'forward'}, {t.status.value}"] += t.count
    return line + "".join(f"; {count} {what}" for what, count in left.items())


def _table(found: Report):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("reduction", "layers", "bytes", "count", "status", "sublayers inside", "cycles inside"):
        table.add_column(name, justify="left" if name in ("reduction", "layers", "status") else "right")
    groups: dict[tuple, list[Reduction]] = {}
    for reduction in found.reductions:
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
    steps = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if steps else f"{len(numbers)} layers of {numbers[0]}-{numbers[-1]}"


def _range(values: list, form: str) -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} - {high}"
