"""Layers that are not all alike, in the speed model: hybrids' backward passes, and first layers
without experts.
"""

import math
from dataclasses import replace

import pytest

from ladder_jax.config import Launch, preset
from ladder_jax.predict import layers, machine, model, program
from ladder_jax.predict.machine import Halves, Link
from ladder_jax.predict.program import PLAIN, Form, Program
from ladder_jax.predict.work import FLOAT32, Model, Task
from tests.predict.asked import H100, HYBRIDS, V5P, check_events, of_layers, with_experts

SHARED = 32  # width of a shared expert
DENSE = 2  # first layers without experts, of 5


def config(name, *, dense=DENSE, count=5):
    return with_experts(name, layers=count, shared_width=SHARED, dense_layers=dense)


@pytest.mark.parametrize(
    "name, which",
    [*HYBRIDS, ("parallel", None), ("parallel-ladder", None), ("parallel-ladder", "0,2")],
)
def test_a_gradient_waits_for_the_inputs_that_hold_its_output(name, which):
    """By the definition: step i's output is in the input of step j if j - delay > i; the link
    carries one message.
    """
    steps = program.steps_of(preset("llama-3-8b", num_layers=6, residual=name, ladder_layers=which))
    last = len(steps) - 1

    def needs(k):
        i = last - k
        held_by = [j for j in range(i + 1, last + 1) if j - steps[j].delay > i]
        return last - min(held_by, default=last + 1)

    check_events(model.backward(steps), needs=needs)


def compute(one):
    """Seconds of the layers' kernels of a prompt on one of 4 devices."""
    return of_layers(one, on=V5P, ranks=4, tokens=256).compute


@pytest.mark.parametrize(
    "name, first",
    {
        "standard": "standard",
        "ladder": "ladder",
        "farskip": "parallel",
    }.items(),
)
def test_first_layers_compute_an_mlp_and_the_others_experts(name, first):
    alone = replace(config(name), moe=None, num_layers=DENSE, residual=first)
    others = config(name, dense=0, count=5 - DENSE)
    assert compute(config(name)) == pytest.approx(compute(alone) + compute(others))
    # an MLP has no rows to sort
    assert compute(config(name)) < 0.9 * compute(config(name, dense=0))


def test_farskips_training_step_has_first_layers_too():

    def step(name):
        shard = Model(config(name), 4, trains=True)
        return model.run_by(Task(shard, V5P, shard.prefill(rows=1, prompt_length=256)), PLAIN)

    # a first layer's two sublayers are reduced together
    assert len(model.backward(program.steps_of(config("farskip")))) == 2 * 5 - DENSE
    assert step("farskip").seconds < step("standard").seconds
    # nothing hides under the first layers
    assert step("ladder").exposed < step("farskip").exposed < step("standard").exposed


ATTENTION = 64 * (2 * 128 + 2 * 64)
EXPERTS = 3 * 64 * (6 * 48 + SHARED) + 64 * 6
MATRICES = 5 * ATTENTION + DENSE * 3 * 64 * 256 + (5 - DENSE) * EXPERTS
TABLES = 2 * 512 * 64


@pytest.mark.parametrize("trains, elements", [(True, 8), (False, 2)])
def test_fsdp_gathers_each_layers_own_matrices(trains, elements):
    """Where transfers outlast all compute: a gather and, of gradients, a gather and a scatter a
    layer, none twice.
    """
    shard = Model(config("standard"), 1, trains)
    link = Link(latency=0.0, step=0.0, bandwidth=1e6)
    slow = replace(H100, flops=math.inf, bandwidth=math.inf, launch=0.0, contention=0.0, link=link)
    found = model.passes_without_tensor(shard, slow, devices=4, rows=4, tokens=64)
    (fsdp,) = (each for each in found if each.program.form is Form.FSDP)
    assert fsdp.seconds == pytest.approx(3 / 4 * elements * (MATRICES + TABLES) / 1e6)


def test_what_a_v5e_starts_at_once():
    """It hides gathers of weights; scatters of gradients, and what a split stream sends, are
    awaited.
    """
    quick = replace(machine.load("v5e"), bandwidth=math.inf, launch=0.0, contention=0.0)
    apart = replace(quick, link=replace(quick.link, halves=Halves.SUPPORTED))
    shard = Model(preset("llama-3-8b", residual="ladder"), 8, trains=True)
    block = shard.prefill(rows=4, prompt_length=8192)

    def played(form=Form.ALL_REDUCE, **settings):
        program = Program(form, launch=Launch.CHAINED, **settings)
        return [layers.layers(Task(shard, on, block, times=2), program) for on in (quick, apart)]

    for interleave in (1, 2):
        waiting, beside = played(Form.SEQUENCE_PARALLEL, interleave=interleave)
        assert waiting.exposed == pytest.approx(waiting.wire)
        assert beside.exposed < 0.1 * beside.wire
    waiting, beside = played()
    assert waiting.seconds == beside.seconds

    alone = Model(preset("llama-3-8b"), 1, trains=True)
    long = alone.prefill(rows=8, prompt_length=8192)
    seconds = lambda size: quick.link.half(size, ranks=4)
    reading = replace(alone, trains=False)
    split = lambda on, one: model.split_weights(Task(one, on, long), seconds)
    assert split(quick, reading).seconds == split(apart, reading).seconds
    waiting, beside = split(quick, alone), split(apart, alone)
    size = FLOAT32 * (alone.shard.attention + alone.shard.mlp)
    assert waiting.exposed - beside.exposed == pytest.approx(31 * seconds(size))
