"""The verb `predict`: parse the arguments, predict, print the result and draw it."""

import numpy as np

from ladder_jax import files, terminal
from ladder_jax.errors import UserError
from ladder_jax.predict import request as requests, result
from ladder_jax.predict.result import Result
from ladder_jax.terminal import number

# parameters of `requests.make`
OPTIONS = (
    "model hardware tensor batch prompt_length new_tokens residual ladder_layers layers phase"
    " sequence launch interleave experts capacity"
).split()


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is written."""
    files.check_picture("plot", args["plot"])
    request = requests.make(**{name: args[name] for name in OPTIONS})
    if args["plot"] and request.phase:
        raise UserError(f"--plot belongs to --phase {requests.GENERATE}, not {args['phase']}")
    answer = result.predict(request)
    terminal.answer(answer, as_json=args["json"])
    if args["plot"]:
        _plot(answer, file=args["plot"])


def _plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed
    communication, in ms.
    """
    request = answer.request
    names = [row.residual for row in answer.rows]
    size = (11, 1.7 + 0.38 * len(names))
    figure, axes = files.panels(1, 2, size=size, sharey=True)
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
    axes[0].invert_yaxis()
    asked = f"{request.model}, tensor {request.tensor}, batch {request.batch}"
    figure.suptitle(f"{asked} on {request.machine.name}: predicted (analytic)", x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    files.write_picture(file, figure)
