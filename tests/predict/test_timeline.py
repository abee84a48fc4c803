"""The timeline: its limits, and its order of events against the recurrence and the program."""

import dataclasses
import itertools

import jax
import pytest

from experiments.predict.authors import Authors
from ladder_jax import nn, residual
from ladder_jax.config import Loop
from ladder_jax.predict import machine
from ladder_jax.predict.program import Choice
from ladder_jax.predict.timeline import Work, play
from ladder_jax.predict.work import Model
from tests import cases
from tests.predict.asked import H100, HYBRIDS, JOINT, MANY, NOTHING, check_events, speed


@pytest.mark.parametrize("name", MANY)
def test_a_link_without_time_is_no_communication(name):
    fast = dataclasses.replace(H100, link=NOTHING)
    found = speed(name, on=fast)
    assert found.exposed == found.wire == 0
    if name not in JOINT:
        assert found.seconds == pytest.approx(speed("no-communication", on=fast).seconds, rel=1e-12)


@pytest.mark.parametrize("name", MANY)
def test_without_compute_everything_is_exposed(name):
    found = speed(name, on=dataclasses.replace(H100, flops=1e60, bandwidth=1e60, launch=0.0))
    assert found.exposed == pytest.approx(found.wire, rel=1e-9)
    assert found.seconds == pytest.approx(found.wire, rel=1e-9)
    assert found.step.hidden == 0


@pytest.mark.parametrize("implementation", [Model, Authors])
def test_on_one_device(implementation):
    """All are equal but the parallel ones, which start other numbers of kernels."""
    found = {name: speed(name, tensor=1, implementation=implementation) for name in MANY}
    standard = found["standard"].seconds
    for name, one in found.items():
        assert one.wire == 0
        assert 0 <= one.exposed < 1e-15
        assert (one.seconds == standard) == (name not in JOINT)
    # of steps in two shares, whose sum is rounded
    shares = dict(on=machine.load("v5e"), rows=5, by=Choice())
    assert 0 <= speed("ladder", tensor=1, implementation=implementation, **shares).exposed < 1e-15


def uniform(name, *, layers=8, which=None, contention=0.0, **times):
    """Sublayers of one busy second each."""
    topology = residual.topology(name, num_layers=layers, ladder_layers=which)
    plan = itertools.chain.from_iterable(topology.layers)
    length = lambda sublayers: Work(busy=len(sublayers))
    return play(plan, work=length, contention=contention, **times)


def test_compute_slows_while_an_all_reduce_is_in_flight():
    found = uniform("ladder", all_reduce=0.5, contention=0.25)
    # 0.5 s in flight does the work of 0.4 s: each of the 15 sublayers that hide one takes 1.1 s.
    assert found.seconds == pytest.approx(1 + 15 * 1.1 + 0.5)
    assert uniform("standard", all_reduce=0.5, contention=0.25).exposed == 8
    half = play(
        residual.topology("ladder", num_layers=1).layers[0],
        work=lambda step: Work(busy=0.5, idle=0.5),
        all_reduce=0.5,
        contention=0.5,
    )
    # only the busy half slows
    assert half.seconds == pytest.approx(1 + 1 + 0.5 * (1 - 1 / 1.25) + 0.5)


@pytest.mark.parametrize("name, which", HYBRIDS)
def test_events_follow_the_recurrence(name, which):
    """Sublayer i reads x_{i-1-d_i}: it starts when the one before has ended and that sum is whole.
    With a window, the all-reduce that it hides is issued when so much of it is left.
    """
    topology = residual.topology(name, num_layers=6, ladder_layers=which)
    steps = list(itertools.chain.from_iterable(topology.layers))
    windows = [1.0] * 20 + [0.6] * 10 + [0.1] * 10
    check_events(steps, needs=lambda k: k - 1 - topology.delays[k], windows=windows)


@pytest.mark.parametrize(
    "name, which",
    [(name, None) for name in MANY]
    + [("ladder", "2"), ("parallel-ladder", "0,2"), ("ladder-2", "1")],
)
def test_as_many_all_reduces_as_the_program_has(name, which):
    """The embedding has one more."""
    definition = cases.define(name, num_layers=4, ladder_layers=which, tensor=8)
    program = nn.compiled_logits(definition, loop=Loop.UNROLLED)
    traced = jax.make_jaxpr(program)(definition.abstract, cases.tokens())
    found = uniform(name, all_reduce=0.5, layers=4, which=which)
    assert found.all_reduces == str(traced).count("psum_invariant[") - 1
