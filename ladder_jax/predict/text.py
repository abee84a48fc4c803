"""The result of `ladder-jax predict` for a terminal."""

from collections.abc import Sequence

from ladder_jax.predict.advice import SAME, WORTH
from ladder_jax.predict.request import Sweep
from ladder_jax.predict.result import Result
from ladder_jax.predict.sweep import Point
from ladder_jax.terminal import Table

COLUMNS = ("residual", "tokens/s", "speed-up", "prefill ms", "step ms", "exposed ms", "hidden", "GiB a device")
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
    assumed = sum("assumed" in source for source in machine.sources.values())
    if assumed:
        tail.append(
            f"note      {assumed} of {machine.name}'s constants are assumed: ladder-jax calibrate measures them"
        )
    return [
        *verdict(answer),
        title,
        f"{shape}; {answer.fidelity}, {PROGRAMS[request.implementation.name]}",
        _table(answer),
        "step, exposed: of a decode step; hidden: the share of its all-reduces' time that adds nothing to the step",
        *tail,
    ]


def verdict(answer: Result) -> list[str]:
    """What to take, and why; where that is not the fastest, the rule."""
    chosen = answer.advice.residual
    said = [f"take {chosen}", f"reason    {answer.advice.reason}"]
    fastest = max((row for row in answer.rows if row.residual != "no-communication"), key=lambda row: row.speedup)
    if fastest.residual != chosen and fastest.speedup >= WORTH:
        said.append(
            f"rule      {fastest.residual} gives {fastest.speedup:.2f}: among topologies within {1 - SAME:.0%} of the"
            " fastest, the one closest to Standard"
        )
    if answer.advice.ladder_helps is False:
        said.append("note      the plain Ladder does not help here")
    return said


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
    notes = [f"note      the model cannot be split over {size} devices: left out" for size in sweep.unsplit]
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
            f"{speed.prefill_seconds * 1e3:.1f}",
            f"{speed.step.seconds * 1e3:.2f}",
            f"{speed.step.exposed * 1e3:.2f}",
            f"{speed.step.hidden:.0%}" if speed.step.wire and row.residual != "no-communication" else "-",
            f"{speed.memory / 2**30:.1f}",
        ))  # fmt: skip
    return Table(COLUMNS, rows, left=("residual",))
