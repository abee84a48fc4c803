"""The verb `predict`: parse the arguments, predict, print the result."""

import json

from ladder_jax import files, terminal
from ladder_jax.errors import UserError
from ladder_jax.predict import compiled, picture, result, sweep, text
from ladder_jax.predict import request as requests

OPTIONS = (
    *("model", "hardware", "tensor", "batch", "prompt_length", "new_tokens", "residual", "ladder_layers", "layers"),
    *("implementation", "phase", "sequence", "launch", "interleave", "experts", "capacity"),
)  # parameters of `requests.make`


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is compiled or written."""
    files.check_picture("plot", args["plot"])
    target = args["from_schedule"]
    if target and args["sweep"]:
        raise UserError("--sweep is analytic: it cannot be combined with --from-schedule")
    if args["phase"] not in (None, requests.GENERATE):
        for option in ("sweep", "from_schedule", "plot"):
            if args[option]:
                name = option.replace("_", "-")
                raise UserError(f"--{name} belongs to --phase {requests.GENERATE}, not {args['phase']}")
    options = {name: args[name] for name in OPTIONS}
    if target:
        options = compiled.with_defaults(options, target)
    if options["hardware"] is None:
        raise UserError(f"--hardware is needed (allowed: {', '.join(requests.machines.NAMES)}, or a .yaml file)")
    request = requests.make(**options)
    if args["sweep"]:
        axes = sweep.parse(request, args["sweep"])
        points = sweep.run(request, axes)
        if args["plot"]:
            if not sweep.front(points):
                raise UserError("--plot: there is nothing to draw, as no topology that communicates fits into memory")
            picture.plot_sweep(points, file=args["plot"])
        document = {"model": request.model, "hardware": request.machine.name, "sweep": [p.as_dict() for p in points]}
        _print(document if args["json"] else text.sweep_lines(points, axes))
        return
    answer = compiled.predict(request, target=target) if target else result.predict(request)
    if args["plot"]:
        picture.plot(answer, file=args["plot"])
    _print(answer.as_dict() if args["json"] else text.lines(answer))


def _print(answer: dict | list) -> None:
    if isinstance(answer, dict):
        print(json.dumps(answer))
        return
    terminal.show(answer)
