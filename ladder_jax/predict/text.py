"""The result of `ladder-jax predict` for a terminal."""

from collections.abc import Sequence

from ladder_jax.config import Launch, Phase
from ladder_jax.predict import phases
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.request import BASELINE, Sweep
from ladder_jax.predict.result import Result, algorithm, described, executed
from ladder_jax.predict.sweep import Point

COLUMNS = (
    *("residual", "tokens/s", "speed-up", "over NCCL", "prefill ms", "step ms", "exposed", "hidden", "GiB"),
    *("all-reduce", "launch"),
)
OF_A_PHASE = ("residual", "tokens/s", "speed-up", "over NCCL", "ms", "exposed ms", "hidden", "form", "launch")
SWEPT = ("tensor", "batch", "link", "take", "speed-up", "ladder", "tokens/s", "a device", "ms/token")
PROGRAMS = {"ours": "this library's programs", "authors": "the paper's authors' programs"}


def lines(answer: Result) -> list:
    """Lines and a table, for rich to print."""
    request, machine = answer.request, answer.request.machine
    title = f"{request.model}, tensor {request.tensor}, batch {request.batch} on {machine.name}"
    shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens"
    tail = []
    if any(row.speed.memory > machine.memory for row in answer.rows):
        tail.append(f"note      weights and cache need more than a device's {machine.memory / 2**30:.0f} GiB")
    tail += _assumed(machine)
    if any(executed(row.speed.step)["launch"] == Launch.EXPLICIT.value for row in answer.rows):
        tail.append(
            "note      explicit launches (decode.launch=explicit) have never run; --launch chained for the default"
        )
    return [
        *verdict(answer),
        f"{title}; {shape}; {answer.fidelity}, {PROGRAMS[request.implementation.name]}",
        "",
        _table(answer),
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard with NCCL's all-reduces (XLA's on a TPU)",
        "step, exposed (ms), all-reduce: of a decode step; hidden: the share of its all-reduces' time that adds",
        "nothing to it; GiB: of a device",
        *tail,
    ]


def phase_lines(answer: phases.Result) -> list:
    """Lines and tables of `--phase prefill` and `--phase train`, for rich to print."""
    request, machine = answer.request, answer.request.machine
    what = "forward and backward" if request.phase is Phase.TRAIN else "prefill"
    title = f"{request.model}, {what} of {request.batch} x {request.tokens} tokens, {request.tensor} devices"
    opponents = [f"{described(one.form, one.all_reduce)} {number(one.tokens_per_second)}" for one in answer.opponents]
    return [
        *verdict(answer),
        f"{title} of {machine.name}; {answer.fidelity}",
        "",
        _phase_table(answer),
        f"Standard's forms, tokens/s: {', '.join(opponents)}",
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard (all-reduce) with NCCL's all-reduces",
        *_assumed(machine),
    ]


def verdict(answer: Result | phases.Result) -> list[str]:
    advice = answer.advice
    if advice.residual == BASELINE:
        return [advice.reason]
    lines = [f"take {advice.residual}: {advice.reason}"]
    if advice.ladder_helps is False:
        lines.append("the plain Ladder: no, it does not help here")
    return lines


def _assumed(machine: Machine) -> list[str]:
    """A note on the constants that nobody measured or verified."""
    notes = []
    for word, what in (("assumed", "assumed"), ("not verified", "figures of threads, not verified")):
        count = sum(word in source for source in machine.sources.values())
        if count:
            notes.append(
                f"note      {count} of {machine.name}'s constants are {what}: ladder-jax calibrate measures yours"
            )
    return notes


def sweep_lines(points: Sequence[Point], sweep: Sweep) -> list:
    """A table with a row per point: the recommended topology, its speed-up and that of the plain Ladder."""
    table = _empty(SWEPT)
    for point in points:
        row = point.chosen
        ladder = next((one for one in point.result.rows if one.residual == "ladder"), None)
        helps = "no help, " if point.result.advice.ladder_helps is False else ""
        table.add_row(
            str(point.tensor),
            str(point.batch),
            f"{point.link:g} x",
            row.residual if point.fits else f"{row.residual} *",
            f"{row.speedup:.2f}",
            f"{helps}{ladder.speedup:.2f}" if ladder else "-",
            number(row.speed.tokens_per_second),
            number(row.speed.tokens_per_second / point.tensor),
            f"{row.speed.step.seconds * 1e3:.2f}",
        )
    notes = ["speed-up, ladder: over the fastest Standard at each point"]
    notes += [f"note      the model cannot be split over {size} devices: left out" for size in sweep.unsplit]
    if not all(point.fits for point in points):
        notes.append("*         weights and cache need more memory than a device has")
    return [table, *notes]


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(answer: Result):
    table = _empty(COLUMNS)
    for row in answer.rows:
        speed = row.speed
        table.add_row(
            row.residual,
            number(speed.tokens_per_second),
            f"{row.speedup:.2f}",
            f"{row.speedup_over_nccl:.2f}",
            f"{speed.prefill_seconds * 1e3:.1f}",
            f"{speed.step.seconds * 1e3:.2f}",
            f"{speed.step.exposed * 1e3:.2f}",
            f"{speed.step.hidden:.0%}" if speed.step.wire else "-",
            f"{speed.memory / 2**30:.1f}",
            algorithm(speed.step) or "-",
            executed(speed.step)["launch"] or "-",
        )
    return table


def _phase_table(answer: phases.Result):
    table = _empty(OF_A_PHASE)
    for row in answer.rows:
        speed, how = row.speed, executed(row.speed)
        table.add_row(
            row.residual,
            number(row.tokens_per_second),
            f"{row.speedup:.2f}",
            f"{row.speedup_over_nccl:.2f}",
            f"{speed.seconds * 1e3:.1f}",
            f"{speed.exposed * 1e3:.1f}",
            f"{speed.hidden:.0%}" if speed.wire else "-",
            described(speed.program.form.value, how["all_reduce"]),
            how["launch"] or "-",
        )
    return table


def _empty(columns: Sequence[str]):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        words = name in ("residual", "form", "all-reduce", "launch", "take")
        table.add_column(name, justify="left" if words else "right", no_wrap=True)
    return table
