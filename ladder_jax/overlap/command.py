"""The verb `overlap`: parse the arguments, compile the program, print the report."""

import json

from ladder_jax import files, terminal
from ladder_jax.config import CollectiveMatmul, ExpertParallelism, Launch, Loop, Phase, Quantize, Remat
from ladder_jax.errors import member
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import picture, result, text
from ladder_jax.overlap import request as requests


def run(args: dict) -> None:
    """Print the report. An invalid argument raises UserError before anything is compiled or written."""
    files.check_picture("plot", args["plot"])
    files.check_writable("trace", args["trace"], endings=(".json",))
    request = requests.make(
        target=args["target"],
        model=args["model"],
        residual=args["residual"],
        phase=member(Phase, "--phase", args["phase"]),
        ladder_layers=args["ladder_layers"],
        loop=member(Loop, "--loop", args["loop"]) if args["loop"] else None,
        remat=member(Remat, "--remat", args["remat"]) if args["remat"] else Remat.NONE,
        launch=member(Launch, "--launch", args["launch"]) if args["launch"] else Launch.AUTO,
        quantize=member(Quantize, "--quantize", args["quantize"]) if args["quantize"] else Quantize.NONE,
        sequence_parallel=args["sequence_parallel"],
        collective_matmul=_collective_matmul(args["collective_matmul"]),
        experts=member(ExpertParallelism, "--experts", args["experts"] or "reduce"),
        capacity=args["capacity"],
        **{
            name: args[name] for name in ("layers", "tensor", "fsdp", "batch", "prompt_length", "context", "interleave")
        },
    )
    answer = result.read(request, compiling.compiled(request))
    if args["plot"]:
        picture.plot(request, file=args["plot"])
    if args["trace"]:
        picture.trace(request, file=args["trace"])
    if args["json"]:
        print(json.dumps(answer.as_dict()))
        return
    terminal.show(text.lines(answer))


def _collective_matmul(name: str | None) -> CollectiveMatmul:
    return member(CollectiveMatmul, "--collective-matmul", name) if name else CollectiveMatmul.NONE
