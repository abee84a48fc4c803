"""The verb `plan`: parse the arguments, rank the candidates, print the plans."""

import json

from ladder_jax import terminal
from ladder_jax.errors import UserError
from ladder_jax.plan import request as requests

OPTIONS = "model target tokens sequence residual layers capacity".split()  # parameters of `requests.make`


def run(args: dict) -> None:
    """Print the plans. An invalid argument raises UserError before anything is compiled."""
    if args["confirm"] < 0:
        raise UserError(f"--confirm must not be negative, not {args['confirm']}")
    request = requests.make(**{name: args[name] for name in OPTIONS})

    from ladder_jax.plan import plans

    answer = plans.answer(request, compiled=args["confirm"])
    if args["json"]:
        print(json.dumps(plans.as_dict(answer)))
        return
    from ladder_jax.plan import text

    terminal.show(text.lines(answer))
