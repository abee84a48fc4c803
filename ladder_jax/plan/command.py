"""The verb `plan`: words to a request, an answer."""

import json

from ladder_jax import terminal
from ladder_jax.errors import UserError
from ladder_jax.plan import request as requests

WORDS = "model target tokens sequence residual layers".split()  # of `requests.make`


def run(args: dict) -> None:
    """Print the answer; raises UserError for what cannot be asked, before anything is compiled."""
    if args["confirm"] < 0:
        raise UserError(f"--confirm must not be negative, not {args['confirm']}")
    request = requests.make(**{name: args[name] for name in WORDS})

    from ladder_jax.plan import plans

    answer = plans.answer(request, compiled=args["confirm"])
    if args["json"]:
        print(json.dumps(plans.as_dict(answer)))
        return
    from ladder_jax.plan import text

    terminal.show(text.lines(answer))
