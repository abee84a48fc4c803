"""The verb `predict`: parse the arguments, predict, print the result and draw it."""

import json

import numpy as np

from ladder_jax import files, terminal
from ladder_jax.config import ExpertParallelism, Launch, Phase
from ladder_jax.errors import UserError
from ladder_jax.predict import request as requests, result
from ladder_jax.predict.model import Speed
from ladder_jax.predict.request import BASELINE
from ladder_jax.predict.result import Result, Row, described
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
    "ms",
    "exposed ms",
    "hidden",
    "form",
    "launch",
)


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is written."""
    files.check_picture("plot", args["plot"])
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
    request = answer.request
    machine = request.machine
    rows = answer.rows
    advice = answer.advice
    generates = request.phase is None
    said = [f"take {advice.residual}", f"reason    {advice.reason}"]
    if advice.residual == BASELINE:
        said = ["no: take standard", f"reason    {advice.reason.removeprefix('no: ')}"]
    elif advice.ladder_helps is False:
        said.append("note      the plain Ladder: no, it does not help here")
    columns = list(COLUMNS)
    if generates:
        what = f"{request.new_tokens} new tokens after prompts of {request.prompt_length}"
        columns[4:5] = ["prefill ms", "step ms"]
    else:
        passed = "forward and backward" if request.phase is Phase.TRAIN else "prefill"
        what = f"{passed} of {request.tokens} tokens"
    said += [
        f"{request.model}, {what}, batch {request.batch}, tensor {request.tensor} on {machine.name}; analytic",
        Table(columns, list(map(_cells, rows)), left=("residual", "form", "launch")),
    ]
    if generates:
        most = max(row.speed.memory for row in rows)
        said += [
            f"speed-up: over {answer.baseline.name}; over NCCL: over Standard with NCCL's all-reduces (XLA's on a TPU)",
            "exposed, form: of a decode step; hidden: the share of its all-reduces' time that adds nothing to it",
            f"memory    {most / 2**30:.1f} GiB of weights and cache a device",
        ]
        if most > machine.memory:
            said.append(
                f"note      weights and cache need more than a device's {machine.memory / 2**30:.0f} GiB"
            )
        if any(row.speed.executed["launch"] == Launch.EXPLICIT.value for row in rows):
            said.append(
                "note      explicit launches, the default here, have never run; --launch chained: without them"
            )
    else:
        forms = [f"{one.described} {number(one.tokens_per_second)}" for one in answer.opponents]
        said += [
            f"Standard's forms, tokens/s: {'; '.join(forms)}",
            f"speed-up: over {answer.baseline.name}; over NCCL: over Standard (all-reduce) with NCCL's all-reduces",
        ]
        if request.experts is ExpertParallelism.EXCHANGE:
            said.append(
                f"exchange  with capacity {request.capacity:g}: whole buffers are sent and computed, full or not"
            )
    doubtful = [
        one for one in machine.sources.values() if "assumed" in one or "not verified" in one
    ]
    if doubtful:
        said.append(
            f"note      {len(doubtful)} of {machine.name}'s constants are assumed, or figures of threads, not"
            " verified: ladder-jax calibrate measures yours"
        )
    return said


def _cells(row: Row) -> tuple[str, ...]:
    prefill = []
    one = row.speed
    if isinstance(one, Speed):
        prefill = [f"{one.prefill.seconds * 1e3:.1f}"]
        one = one.step
    hides = one.wire and row.residual != "no-communication"
    form = described(one.form, one.executed["all_reduce"], one.interleave)
    return (
        row.residual,
        number(row.tokens_per_second),
        f"{row.speedup:.2f}",
        f"{row.speedup_over_nccl:.2f}",
        *prefill,
        f"{one.seconds * 1e3:.2f}",
        f"{one.exposed * 1e3:.2f}",
        f"{one.hidden:.0%}" if hides else "-",
        form if hides else "-",
        one.executed["launch"] or "-",
    )


def _plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed
    communication, in ms.
    """
    request = answer.request
    names = [row.residual for row in answer.rows]
    size = (11, 1.7 + 0.38 * len(names))
    figure, axes = files.pyplot().subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axis, phase in zip(axes, ("step", "prefill")):
        passes = [getattr(row.speed, phase) for row in answer.rows]
        seconds = np.array([1e3 * one.seconds for one in passes])
        exposed = np.array([1e3 * one.exposed for one in passes])
        compute = seconds - exposed
        axis.barh(names, compute, color="#4c78a8", label="compute")
        bars = axis.barh(
            names, exposed, left=compute, color="#e45756", label="exposed communication"
        )
        axis.bar_label(bars, map(number, seconds), padding=3)
        axis.margins(x=0.15)
        axis.set_xlabel(f"ms of a {'decode step' if phase == 'step' else 'prefill'}")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    asked = f"{request.model}, tensor {request.tensor}, batch {request.batch}"
    figure.suptitle(f"{asked} on {request.machine.name}: predicted (analytic)", x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    files.write_picture(file, figure)
