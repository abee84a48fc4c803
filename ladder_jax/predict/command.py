"""The verb `predict`: words to a request, predictions, an answer."""

import json

from ladder_jax import files, terminal
from ladder_jax.errors import UserError
from ladder_jax.predict import request as requests

WORDS = (
    "model hardware tensor batch prompt_length new_tokens residual ladder_layers layers implementation".split()
)  # of `requests.make`


def run(args: dict) -> None:
    """Print the answer; raises UserError for what cannot be asked, before anything is compiled or written."""
    files.check_picture("plot", args["plot"])
    target = args["from_schedule"]
    if target and args["sweep"]:
        raise UserError("--sweep is analytic: it cannot be had --from-schedule")
    given = {name: args[name] for name in WORDS}
    if target:
        from ladder_jax.predict import compiled

        given = compiled.settle(given, target)
    if given["hardware"] is None:
        raise UserError(f"--hardware is needed (allowed: {', '.join(requests.machines.NAMES)}, or a .yaml file)")
    request = requests.make(**given)
    wanted = requests.sweep(request, args["sweep"]) if args["sweep"] else None

    from ladder_jax.predict import picture, result, sweep, text

    if wanted:
        points = sweep.run(request, wanted)
        if args["plot"]:
            if not sweep.front(points):
                raise UserError("--plot: there is nothing to draw, as no topology that communicates fits into memory")
            picture.plot_sweep(points, file=args["plot"])
        whole = {"model": request.model, "hardware": request.machine.name, "sweep": [p.as_dict() for p in points]}
        _print(whole if args["json"] else text.sweep_lines(points, wanted))
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
