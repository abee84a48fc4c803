"""What the tests of the speed model ask it, and of which machines."""

import dataclasses
import json
import math

from ladder_jax import cli
from ladder_jax.config import RESIDUALS, parse_residual, preset
from ladder_jax.predict import machine, model, request, result
from ladder_jax.predict.machine import Link

H100 = machine.load("h100-nvlink")
OFF = machine.load("h100-no-nvlink")
MANY = (*RESIDUALS, "ladder-3", "desync-3")
JOINT = ("parallel", "parallel-shared-norm", "parallel-ladder")
NOTHING = Link(latency=0.0, step=0.0, bandwidth=math.inf)


def speed(name, *, on=H100, tensor=8, rows=4, shape="llama-3-8b", layers=6, **more):
    ranks = {"ranks": tensor} if parse_residual(name).depends_on_ranks else {}
    config = preset(shape, residual=name, num_layers=layers, **ranks)
    return model.speed(config, machine=on, tensor=tensor, rows=rows, **more)


def seconds(found):
    return found.prefill_seconds + found.decode_seconds


def with_link(**changes):
    return dataclasses.replace(H100, link=dataclasses.replace(H100.link, **changes))


def run(capsys, *words):
    """`ladder-jax predict`'s exit status, output and errors."""
    status = cli.main(["predict", *map(str, words)])
    return status, *capsys.readouterr()


def answered(capsys, *words):
    """Its answer as JSON."""
    status, out, err = run(capsys, *words, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def by_residual(answer):
    return {row["residual"]: row for row in answer["rows"]}


def predict(**asked):
    """The answer of the library: by default to a question about a large model on one node."""
    return result.predict(
        request.make(**dict(model="llama-3-70b", hardware="h100-nvlink", tensor=8) | asked)
    )
