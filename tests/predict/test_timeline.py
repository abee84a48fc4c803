"""The timeline: its limits, and its order of events against the recurrence and the program."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, residual
from ladder_jax.predict.timeline import Work, play
from ladder_jax.predict.work import AUTHORS, OURS
from tests.predict.asked import H100, JOINT, MANY, NOTHING, seconds, speed, with_link


@pytest.mark.parametrize("name", MANY)
def test_a_link_without_time_is_no_communication(name):
    fast = dataclasses.replace(H100, link=NOTHING)
    found = speed(name, on=fast)
    assert found.exposed == found.wire == 0
    if name not in JOINT:
        assert seconds(found) == pytest.approx(
            seconds(speed("no-communication", on=fast)), rel=1e-12
        )


@pytest.mark.parametrize("name", MANY)
def test_without_compute_everything_is_exposed(name):
    idle = dataclasses.replace(H100, flops=1e60, bandwidth=1e60, launch=0.0)
    found = speed(name, on=idle)
    assert found.exposed == pytest.approx(found.wire, rel=1e-9)
    assert seconds(found) == pytest.approx(found.wire, rel=1e-9)
    assert found.step.hidden == 0


@pytest.mark.parametrize("implementation", [OURS, AUTHORS], ids=["ours", "authors"])
def test_on_one_device(implementation):
    """All are equal but the parallel ones, which start other numbers of kernels."""
    found = {name: speed(name, tensor=1, implementation=implementation) for name in MANY}
    standard = seconds(found["standard"])
    for name, one in found.items():
        assert one.wire == 0
        assert one.exposed == pytest.approx(0, abs=1e-15)
        assert (seconds(one) == standard) == (name not in JOINT)


def uniform(name, *, lengths=(1.0, 1.0), all_reduce, layers=8, contention=0.0):
    """Sublayers of given lengths, all of them busy."""
    plan = itertools.chain.from_iterable(residual.topology(name, num_layers=layers).layers)
    length = lambda sublayers: Work(busy=sum(lengths[i] for i in sublayers), idle=0.0)
    return play(plan, work=length, all_reduce=all_reduce, contention=contention)


def test_what_a_delay_hides():
    """Of uneven sublayers a delay of 1 shows half of each MLP's all-reduce, and the last one
    wholly.
    """
    uneven = {
        delay: uniform(f"ladder-{delay}", lengths=(0.5, 1.5), all_reduce=1.0) for delay in (1, 2)
    }
    assert uneven[1].exposed == 7 * 0.5 + 1
    assert uneven[2].exposed == 1
    assert (
        uniform("parallel-ladder", all_reduce=2.0).exposed
        == 2
        < uniform("ladder", all_reduce=2.0).exposed
    )


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


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("standard", None),
        ("ladder", None),
        ("ladder-2", None),
        ("ladder-5", None),
        ("ladder", "2"),
        ("ladder", "0,3"),
    ]
    + [("ladder-3", "1,2,4"), ("ladder-fresh", "3")],
)
def test_events_follow_the_recurrence(name, which):
    """Sublayer i reads x_{i-1-d_i}: it starts when the one before has ended and that sum is whole.
    With a window, the all-reduce that it hides is issued when so much of it is left.
    """
    topology = residual.topology(name, num_layers=6, ladder_layers=which)
    rng = random.Random(0)
    for window in [1.0] * 20 + [0.6] * 10 + [0.1] * 10:
        lengths = [rng.uniform(0.2, 2) for _ in topology.delays]
        wire = rng.choice((0.1, 0.7, 1.3, 3))
        ended = []
        whole = []
        reduce = lambda ready: whole.append(max([ready, *whole[-1:]]) + wire)  # noqa: B023
        for index, (delay, length) in enumerate(zip(topology.delays, lengths)):
            if index and not delay:
                reduce(ended[-1])
            reads = index - 1 - delay
            # A whole sum means that all before it are.
            start = max(ended[-1] if ended else 0.0, whole[reads] if reads >= 0 else 0.0)
            if index and delay:
                reduce(ended[-1] if window == 1 else start + (1 - window) * length)
            ended.append(start + length)
        reduce(ended[-1])
        order = iter(lengths)
        steps = itertools.chain.from_iterable(topology.layers)
        found = play(
            steps,
            work=lambda step: Work(next(order), 0.0),
            all_reduce=wire,
            contention=0.0,
            window=window,
        )
        assert found.seconds == pytest.approx(whole[-1])
        assert [bar.stop for bar in found.bars if not bar.wire] == pytest.approx(ended)


@pytest.mark.parametrize(
    ("name", "which"),
    [(name, None) for name in MANY]
    + [("ladder", "2"), ("parallel-ladder", "0,2"), ("ladder-2", "1")],
)
def test_as_many_all_reduces_as_the_program_has(name, which):
    topology = residual.topology(name, num_layers=4, ladder_layers=which)

    def program(x):
        state = residual.begin(x, topology=topology, axes=("tensor",))
        for steps in topology.layers:
            for step in steps:
                state = step(state, (jnp.sin, jnp.cos), axes=("tensor",))
        return residual.flush(state, axes=("tensor",))

    out = P("tensor") if name == "no-communication" else P()
    mesh = parallel.make_mesh(tensor=8)
    traced = jax.make_jaxpr(jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=out))(
        jnp.ones((8, 2, 4))
    )
    found = play(
        itertools.chain.from_iterable(topology.layers),
        work=lambda step: Work(1.0, 0.0),
        all_reduce=0.5,
        contention=0.0,
    )
    assert found.all_reduces == str(traced).count("psum")


@pytest.mark.parametrize("name", MANY)
def test_monotonic(name):
    of = lambda **more: seconds(speed(name, layers=3, **more))
    device = lambda field: lambda value: of(on=dataclasses.replace(H100, **{field: value}))
    link = lambda field: lambda value: of(on=with_link(**{field: value}))
    for slower, values in (
        (link("latency"), (0, 1e-6, 3e-5, 1e-3)),
        (link("step"), (0, 1e-7, 1e-5)),
        (link("bandwidth"), (1e13, 1e11, 1e9)),
        (device("contention"), (0, 0.1, 2)),
        (device("launch"), (0, 1e-6, 1e-5)),
        (device("bandwidth"), (8e12, 4e12, 1e12)),
        (device("flops"), (2e15, 1e15, 1e14)),
        (lambda rows: of(rows=rows), (1, 2, 16, 256)),
        (lambda length: of(prompt_length=length), (1, 16, 4096)),
    ):
        times = list(map(slower, values))
        assert times == sorted(times)
        assert times[0] < times[-1] * (1 + 1e-12)
    throughput = [speed(name, rows=rows, layers=3).tokens_per_second for rows in (1, 4, 64)]
    assert throughput == sorted(throughput)
