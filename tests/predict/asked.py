"""What the tests of the speed model ask it, and of which machines."""

import json
import math
import random

import pytest

from ladder_jax import cli
from ladder_jax.config import RESIDUALS, parse_residual, preset
from ladder_jax.predict import layers, machine, model, request, result
from ladder_jax.predict.machine import Link
from ladder_jax.predict.program import PLAIN
from ladder_jax.predict.timeline import Work, play
from ladder_jax.predict.work import Model, Task

H100 = machine.load("h100-nvlink")
V5P = machine.load("v5p")
MANY = (*RESIDUALS, "ladder-3", "desync-3")
JOINT = ("parallel", "parallel-shared-norm", "parallel-ladder")
NOTHING = Link(latency=0.0, step=0.0, bandwidth=math.inf)
# (topology, ladder layers) of at most six layers
HYBRIDS = [
    ("standard", None),
    ("ladder", None),
    ("ladder-2", None),
    ("ladder-3", None),
    ("ladder-5", None),
    ("ladder", "2"),
    ("ladder", "0,3"),
    ("ladder-2", "0,3"),
    ("ladder-3", "1,2,4"),
    ("ladder-5", "1,2,3"),
    ("ladder-fresh", "3"),
]


def speed(name, *, on=H100, tensor=8, rows=4, shape="llama-3-8b", layers=6, **more):
    ranks = {"ranks": tensor} if parse_residual(name).depends_on_ranks else {}
    config = preset(shape, residual=name, num_layers=layers, **ranks)
    return model.speed(config, machine=on, tensor=tensor, rows=rows, **more)


def with_experts(name, *, which=None, layers=3, capacity=None, **moe):
    """A small model with six experts, of which two compute a token."""
    moe |= dict(experts=6, top_k=2, expert_width=48, capacity=capacity)
    return preset(
        "tiny-moe",
        residual=name,
        ladder_layers=which,
        vocab_size=512,
        moe=moe,
        num_layers=layers,
        d_model=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        d_ff=256,
    )


def prompt(config, *, ranks=8, rows=1, tokens=1):
    """One of `ranks` devices' shard of the model, and its block of a prompt."""
    shard = Model(config, ranks)
    return shard, shard.prefill(rows=rows, prompt_length=tokens)


def of_layers(config, *, on=H100, program=PLAIN, times=1, **shape):
    """The timeline of a prompt's layers."""
    shard, block = prompt(config, **shape)
    return layers.layers(Task(shard, on, block, times), program)


def run(capsys, words):
    """What `ladder-jax predict` prints, without errors."""
    status = cli.main(["predict", *words.split()])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def answered(capsys, words):
    """Its answer as JSON."""
    return json.loads(run(capsys, f"{words} --json"))


def by_residual(answer):
    return {row["residual"]: row for row in answer["rows"]}


def predict(**asked):
    """The answer of the library: by default to a question about a large model on one node."""
    return result.predict(
        request.make(**dict(model="llama-3-70b", hardware="h100-nvlink", tensor=8) | asked)
    )


def check_events(steps, *, needs, windows=(1.0,) * 20):
    """A timeline of drawn lengths against its definition. The link carries one sum after another,
    each from the end of its step on, or from where the last share `window` of the next step begins
    if that does without it. needs(k): the last step whose sum must be whole when step k starts;
    negative if none.
    """
    rng = random.Random(0)
    for window in windows:
        lengths = [rng.uniform(0.2, 2) for _ in steps]
        wire = rng.choice((0.1, 0.7, 1.3, 3))
        ended = []
        whole = []
        reduce = lambda ready: whole.append(max([ready, *whole[-1:]]) + wire)  # noqa: B023
        for k, length in enumerate(lengths):
            needed = needs(k)
            before = ended[-1] if k else 0.0
            if k and needed == k - 1:
                reduce(before)
            start = max(before, whole[needed] if needed >= 0 else 0.0)
            if k and needed < k - 1:
                reduce(before if window == 1 else start + (1 - window) * length)
            ended.append(start + length)
        reduce(ended[-1])
        order = iter(lengths)
        work = lambda sublayers: Work(next(order))  # noqa: B023
        found = play(steps, work=work, all_reduce=wire, contention=0.0, window=window)
        assert found.seconds == pytest.approx(whole[-1])
