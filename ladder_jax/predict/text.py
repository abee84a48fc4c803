"""The result of `ladder-jax predict` for a terminal."""

from collections.abc import Sequence

from ladder_jax.config import ExpertParallelism, Launch, Phase
from ladder_jax.predict.advice import SAME, WORTH
from ladder_jax.predict.machine import Machine
from ladder_jax.predict.request import BASELINE, Request
from ladder_jax.predict.result import Result, algorithm, described, executed, in_turn
from ladder_jax.predict.sweep import Point, Sweep
from ladder_jax.terminal import Table

COLUMNS = (
    *("residual", "tokens/s", "speed-up", "over NCCL", "prefill ms", "step ms", "exposed", "hidden"),
    *("all-reduce", "launch"),
)
OF_A_PHASE = ("residual", "tokens/s", "speed-up", "over NCCL", "ms", "exposed ms", "hidden", "form", "launch")
WORDS = ("residual", "form", "all-reduce", "launch")  # columns of words
SWEPT = ("tensor", "batch", "link", "take", "speed-up", "ladder", "tokens/s", "a device", "ms/token")
PROGRAMS = {"ours": "this library's programs", "authors": "the paper's authors' programs"}


def lines(answer: Result) -> list:
    """Lines and a table, for `terminal.show`."""
    request, machine = answer.request, answer.request.machine
    title = f"{request.model}, tensor {request.tensor}, batch {request.batch} on {machine.name}"
    shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens"
    tail = []
    if request.tensor > 1 and "no-communication" in request.residuals:
        tail.append("note      no-communication: what the embedding and the choice of each token communicate is left")
    if any(row.speed.memory > machine.memory for row in answer.rows):
        tail.append(f"note      weights and cache need more than a device's {machine.memory / 2**30:.0f} GiB")
    tail += _assumed(machine)
    if any(executed(row.speed.step)["launch"] == Launch.EXPLICIT.value for row in answer.rows):
        tail.append("note      explicit launches, the default here, have never run; --launch chained: without them")
    return [
        *verdict(answer),
        title,
        f"{shape}; {answer.fidelity}, {PROGRAMS[request.implementation.name]}",
        _table(answer),
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard with NCCL's all-reduces (XLA's on a TPU)",
        "step, exposed (ms), all-reduce: of a decode step; hidden: the share of its all-reduces' time that adds nothing"
        " to it",
        f"memory    {max(row.speed.memory for row in answer.rows) / 2**30:.1f} GiB of weights and cache a device",
        *tail,
    ]


def phase_lines(answer: Result) -> list:
    """Lines and a table of `--phase prefill` and `--phase train`, for `terminal.show`."""
    request, machine = answer.request, answer.request.machine
    what = "forward and backward" if request.phase is Phase.TRAIN else "prefill"
    title = f"{request.model}, {what} of {request.batch} x {request.tokens} tokens, {request.tensor} devices"
    opponents = [f"{one.described} {number(one.tokens_per_second)}" for one in answer.opponents]
    return [
        *verdict(answer),
        f"{title} of {machine.name}; {answer.fidelity}",
        _phase_table(answer),
        f"Standard's forms, tokens/s: {'; '.join(opponents)}",
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard (all-reduce) with NCCL's all-reduces",
        *_exchanged(request),
        *_assumed(machine),
    ]


def _exchanged(request: Request) -> list[str]:
    if request.experts is ExpertParallelism.REDUCE:
        return []
    return [f"exchange  with capacity {request.capacity:g}: whole buffers are sent and computed, full or not"]


def verdict(answer: Result) -> list[str]:
    """What to take, and why; where that is not the fastest, the rule."""
    advice = answer.advice
    if advice.residual == BASELINE:
        return ["no: take standard", f"reason    {advice.reason.removeprefix('no: ')}"]
    said = [f"take {advice.residual}", f"reason    {advice.reason}"]
    fastest = max((row for row in answer.rows if row.residual != "no-communication"), key=lambda row: row.speedup)
    if fastest.residual != advice.residual and fastest.speedup >= WORTH:
        said.append(
            f"rule      {fastest.residual} gives {fastest.speedup:.2f}: among topologies within {1 - SAME:.0%} of the"
            " fastest, the one closest to Standard"
        )
    if advice.ladder_helps is False:
        said.append("note      the plain Ladder: no, it does not help here")
    return said


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
    rows = []
    for point in points:
        row = point.chosen
        ladder = next((one for one in point.result.rows if one.residual == "ladder"), None)
        helps = "no help, " if point.result.advice.ladder_helps is False else ""
        rows.append((
            str(point.tensor),
            str(point.batch),
            f"{point.link:g} x",
            row.residual if point.fits else f"{row.residual} *",
            f"{row.speedup:.2f}",
            f"{helps}{ladder.speedup:.2f}" if ladder else "-",
            number(row.speed.tokens_per_second),
            number(row.speed.tokens_per_second / point.tensor),
            f"{row.speed.step.seconds * 1e3:.2f}",
        ))  # fmt: skip
    notes = ["speed-up, ladder: over the fastest Standard at each point"]
    notes += [f"note      the model cannot be split over {size} devices: left out" for size in sweep.unsplit]
    if not all(point.fits for point in points):
        notes.append("*         weights and cache need more memory than a device has")
    return [Table(SWEPT, rows, left=("take",)), *notes]


def number(value: float) -> str:
    """Three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(answer: Result) -> Table:
    rows = []
    for row in answer.rows:
        speed = row.speed
        rows.append((
            row.residual,
            number(speed.tokens_per_second),
            f"{row.speedup:.2f}",
            f"{row.speedup_over_nccl:.2f}",
            f"{speed.prefill_seconds * 1e3:.1f}",
            f"{speed.step.seconds * 1e3:.2f}",
            f"{speed.step.exposed * 1e3:.2f}",
            f"{speed.step.hidden:.0%}" if speed.step.wire and row.residual != "no-communication" else "-",
            algorithm(speed.step) or "-",
            executed(speed.step)["launch"] or "-",
        ))  # fmt: skip
    return Table(COLUMNS, rows, left=WORDS)


def _phase_table(answer: Result) -> Table:
    rows = []
    for row in answer.rows:
        speed, how = row.speed, executed(row.speed)
        rows.append((
            row.residual,
            number(row.tokens_per_second),
            f"{row.speedup:.2f}",
            f"{row.speedup_over_nccl:.2f}",
            f"{speed.seconds * 1e3:.1f}",
            f"{speed.exposed * 1e3:.1f}",
            f"{speed.hidden:.0%}" if speed.wire else "-",
            described(speed.program.form.value, how["all_reduce"]) + in_turn(speed.program.interleave),
            how["launch"] or "-",
        ))  # fmt: skip
    return Table(OF_A_PHASE, rows, left=WORDS)
