"""The verb `plan`: words to a request, an answer."""

import json

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
    from rich.console import Console

    from ladder_jax.plan import text

    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, text.WIDTH)
    for part in text.lines(answer):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
