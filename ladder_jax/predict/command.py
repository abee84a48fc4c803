"""The verb `predict`: parse the arguments, predict, print the result and draw it."""

import json

from ladder_jax import files, terminal
from ladder_jax.config import ExpertParallelism, Launch, Phase
from ladder_jax.errors import UserError
from ladder_jax.predict import request as requests
from ladder_jax.predict import result
from ladder_jax.predict.machine import NAMES, Machine
from ladder_jax.predict.request import BASELINE
from ladder_jax.predict.result import SAME, WORTH, Result, Row, described, in_turn
from ladder_jax.terminal import Table, number

# parameters of `requests.make`
OPTIONS = (
    "model hardware tensor batch prompt_length new_tokens residual ladder_layers layers phase"
    " sequence launch interleave experts capacity"
).split()
COLUMNS = (
    "residual",
    "tokens/s",
    "speed-up",
    "over NCCL",
    "prefill ms",
    "step ms",
    "exposed",
    "hidden",
    "all-reduce",
    "launch",
)
OF_A_PHASE = (
    "residual",
    "tokens/s",
    "speed-up",
    "over NCCL",
    "ms",
    "exposed ms",
    "hidden",
    "form",
    "launch",
)
WORDS = ("residual", "form", "all-reduce", "launch")  # columns of words
COMPUTE = "#4c78a8"
EXPOSED = "#e45756"


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is written."""
    files.check_picture("plot", args["plot"])
    if args["hardware"] is None:
        raise UserError(f"--hardware is needed (allowed: {', '.join(NAMES)}, or a .yaml file)")
    request = requests.make(**{name: args[name] for name in OPTIONS})
    if args["plot"] and request.phase:
        raise UserError(f"--plot belongs to --phase {requests.GENERATE}, not {args['phase']}")
    answer = result.predict(request)
    if args["plot"]:
        _plot(answer, file=args["plot"])
    if args["json"]:
        print(json.dumps(answer.as_dict()))
    else:
        terminal.show(lines(answer))


def lines(answer: Result) -> list:
    """Lines and a table, for `terminal.show`."""
    return [
        *_verdict(answer),
        *(_of_one_pass(answer) if answer.request.phase else _of_generation(answer)),
    ]


def _of_generation(answer: Result) -> list:
    request = answer.request
    machine = answer.request.machine
    rows = answer.rows
    most = max(row.speed.memory for row in rows)
    tail = []
    if request.tensor > 1 and "no-communication" in request.residuals:
        tail.append(
            "note      no-communication: what the embedding and the choice of each token communicate is left"
        )
    if most > machine.memory:
        tail.append(
            f"note      weights and cache need more than a device's {machine.memory / 2**30:.0f} GiB"
        )
    tail += _assumed(machine)
    if any(row.speed.executed["launch"] == Launch.EXPLICIT.value for row in rows):
        tail.append(
            "note      explicit launches, the default here, have never run; --launch chained: without them"
        )
    return [
        f"{request.model}, tensor {request.tensor}, batch {request.batch} on {machine.name}",
        f"prompt {request.prompt_length}, {request.new_tokens} new tokens; analytic, this library's programs",
        Table(COLUMNS, list(map(_generated, rows)), left=WORDS),
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard with NCCL's all-reduces (XLA's on a TPU)",
        "step, exposed (ms), all-reduce: of a decode step; hidden: the share of its all-reduces' time that adds nothing"
        " to it",
        f"memory    {most / 2**30:.1f} GiB of weights and cache a device",
        *tail,
    ]


def _of_one_pass(answer: Result) -> list:
    request = answer.request
    machine = answer.request.machine
    what = "forward and backward" if request.phase is Phase.TRAIN else "prefill"
    title = f"{request.model}, {what} of {request.batch} x {request.tokens} tokens, {request.tensor} devices"
    opponents = [f"{one.described} {number(one.tokens_per_second)}" for one in answer.opponents]
    exchanged = []
    if request.experts is ExpertParallelism.EXCHANGE:
        exchanged = [
            f"exchange  with capacity {request.capacity:g}: whole buffers are sent and computed, full or not"
        ]
    return [
        f"{title} of {machine.name}; analytic",
        Table(OF_A_PHASE, list(map(_passed, answer.rows)), left=WORDS),
        f"Standard's forms, tokens/s: {'; '.join(opponents)}",
        f"speed-up: over {answer.baseline.name}; over NCCL: over Standard (all-reduce) with NCCL's all-reduces",
        *exchanged,
        *_assumed(machine),
    ]


def _verdict(answer: Result) -> list[str]:
    """What to take, and why; where that is not the fastest, the rule."""
    advice = answer.advice
    if advice.residual == BASELINE:
        return ["no: take standard", f"reason    {advice.reason.removeprefix('no: ')}"]
    said = [f"take {advice.residual}", f"reason    {advice.reason}"]
    fastest = max(
        (row for row in answer.rows if row.residual != "no-communication"),
        key=lambda row: row.speedup,
    )
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
    for word, what in (
        ("assumed", "assumed"),
        ("not verified", "figures of threads, not verified"),
    ):
        if count := sum(word in source for source in machine.sources.values()):
            told = f"{count} of {machine.name}'s constants are {what}"
            notes.append(f"note      {told}: ladder-jax calibrate measures yours")
    return notes


def _generated(row: Row) -> tuple[str, ...]:
    speed = row.speed
    step = row.speed.step
    return (
        *_speeds(row),
        f"{speed.prefill_seconds * 1e3:.1f}",
        f"{step.seconds * 1e3:.2f}",
        f"{step.exposed * 1e3:.2f}",
        f"{step.hidden:.0%}" if step.wire and row.residual != "no-communication" else "-",
        *(word or "-" for word in speed.executed.values()),
    )


def _passed(row: Row) -> tuple[str, ...]:
    one = row.speed
    return (
        *_speeds(row),
        f"{one.seconds * 1e3:.1f}",
        f"{one.exposed * 1e3:.1f}",
        f"{one.hidden:.0%}" if one.wire else "-",
        described(one.program.form.value, one.executed["all_reduce"]) + in_turn(one.interleave),
        one.executed["launch"] or "-",
    )


def _speeds(row: Row) -> tuple[str, ...]:
    return (
        row.residual,
        number(row.tokens_per_second),
        f"{row.speedup:.2f}",
        f"{row.speedup_over_nccl:.2f}",
    )


def _plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed
    communication.
    """
    request = answer.request
    names = [row.residual for row in answer.rows]
    figure, axes = files.pyplot().subplots(
        1, 2, figsize=(11, 1.7 + 0.38 * len(names)), sharey=True, layout="constrained"
    )
    for axis, title, phase in zip(axes, ("decode step", "prefill"), ("step", "prefill")):
        passes = {row.residual: getattr(row.speed, phase) for row in answer.rows}
        exposed = [1e3 * one.exposed for one in passes.values()]
        compute = [1e3 * (one.seconds - one.exposed) for one in passes.values()]
        labels = [number(1e3 * one.seconds) for one in passes.values()]
        unit = "ms"
        if standard := passes.get(BASELINE):
            ratios = [standard.seconds / one.seconds for one in passes.values()]
            labels = [f"{label}   {ratio:.2f} x" for label, ratio in zip(labels, ratios)]
            unit = "ms; x: the time of Standard, drawn here, over it"
        axis.barh(names, compute, color=COMPUTE, height=0.68, label="compute")
        bars = axis.barh(
            names, exposed, left=compute, color=EXPOSED, height=0.68, label="exposed communication"
        )
        axis.bar_label(bars, labels, padding=3, fontsize=8.5)
        axis.margins(x=0.22)
        axis.set_xlabel(unit)
        axis.set_title(title, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    title = (
        f"{request.model}, tensor {request.tensor}, batch {request.batch} on {request.machine.name}"
    )
    figure.suptitle(f"{title}: predicted (analytic)", fontsize=11, x=0.01, ha="left")
    labelled = axes[0].get_legend_handles_labels()
    figure.legend(*labelled, fontsize=8.5, frameon=False, loc="outside upper right", ncols=2)
    files.write_picture(file, figure)
