"""The verb `overlap`: compile the program, print the report."""

import dataclasses

from ladder_jax import files, terminal
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import picture, result
from ladder_jax.overlap import request as requests

OPTIONS = [field.name for field in dataclasses.fields(requests.Request) if field.name != "shape"]


def run(args: dict) -> None:
    """Print the report. An invalid argument raises UserError before anything is compiled or
    written.
    """
    files.check_picture("plot", args["plot"])
    files.check_writable("trace", args["trace"], endings=(".json",))
    request = requests.make(**{name: args[name] for name in OPTIONS})
    answer = result.read(request, compiling.compiled(request))
    if args["plot"]:
        picture.plot(request, file=args["plot"])
    if args["trace"]:
        picture.trace(request, file=args["trace"])
    terminal.answer(answer, as_json=args["json"])
