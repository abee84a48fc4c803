"""Experts whose rows are exchanged, in the speed model: transfers and timelines by hand, opponents,
refusals.
"""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from ladder_jax import decode, nn, parallel
from ladder_jax.config import ExpertParallelism, Interleave, Loop, Phase
from ladder_jax.decode import weights
from ladder_jax.predict import machine, model, request
from ladder_jax.predict.machine import Link, Network, Ring
from ladder_jax.predict.program import Choice, Form, Program
from ladder_jax.predict.work import Model, Task
from ladder_jax.residual.wires import exchange as wire, sequence
from tests.changed import ROOT
from tests.predict.asked import H100, answered, by_residual, of_layers, predict, run, with_experts

RANKS = 4
TOKENS = 256  # of all ranks
# of the small model
LAYERS = 3
D = 64
HEADS = 8
KEYS = 4
HEAD = 16
E, K, M, SHARED, CAPACITY = 6, 2, 48, 32, 1.5  # experts, of which two fill up: 8
PER_RANK = TOKENS // RANKS
SLOTS = math.ceil(CAPACITY * PER_RANK * K / E)  # 32
ROWS = 8 * SLOTS
BANDWIDTH = 1e9  # of the link, bytes a second


def config(name, *, shared=0, which=None):
    return with_experts(name, which=which, shared_width=shared, capacity=CAPACITY)


def device(*, flops):
    """Without launches, contention and latencies."""
    none = dict(launch=0.0, contention=0.0, link=Link(latency=0.0, step=0.0, bandwidth=BANDWIDTH))
    return replace(H100, flops=flops, flops_share=1.0, bandwidth=math.inf, **none)


def timeline(one, on, *, times=1, interleave=1):
    """Of one row, or of two rows in turn."""
    program = Program(Form.EXCHANGE, interleave=interleave)
    return of_layers(
        one, on=on, program=program, times=times, ranks=RANKS, rows=interleave, tokens=TOKENS
    )


HALF = 3 / 4 * TOKENS * D * 2 / BANDWIDTH  # a gather or a reduce-scatter
SENT = 3 / 4 * ROWS * D * 2 / BANDWIDTH  # an all-to-all
# columns of a rank
QUERIES = HEADS // RANKS * HEAD
CACHED = KEYS // RANKS * HEAD
FLOPS = dict(
    into=2 * TOKENS * D * (QUERIES + 2 * CACHED),
    out=4 * TOKENS * QUERIES * (TOKENS + 1) / 2 + 2 * TOKENS * QUERIES * D,
    route=2 * PER_RANK * D * E,
    first=2 * ROWS * D * 2 * M,
    last=2 * ROWS * M * D,
    shared=2 * TOKENS * D * 3 * SHARED // RANKS,
)


def parts(*, shared, scale):
    """Seconds of each; none of a shared expert that is not there."""
    *routed, beside = (scale * flops for flops in FLOPS.values())
    return *routed, beside if shared else 0.0


def expected(name, *, shared, scale):
    """Seconds of LAYERS layers; `scale`: of a FLOP."""
    into, out, route, first, last, beside = parts(shared=shared, scale=scale)
    if name == "no-communication":
        return LAYERS * (into + out + route + first + last + beside)
    if name == "standard":
        compute = into + out + route + first + last
        messages = 2 * HALF + max(beside, SENT) + SENT
        if shared:
            messages += 2 * HALF
        return LAYERS * (compute + messages)
    dispatch = combine = SENT
    early = 0.0
    if shared:
        dispatch += HALF
    if name == "farskip":  # it computes the shared expert before attention's sum is sent
        early, beside = beside, 0.0
    elif shared:
        combine += HALF
    each = route + max(out, dispatch) + early + max(first + beside, HALF)
    between = max(into, combine) + max(last, HALF)  # two layers
    return HALF + into + LAYERS * each + (LAYERS - 1) * between + last + combine


CASES = [
    ("standard", 0),
    ("standard", SHARED),
    ("ladder", 0),
    ("ladder", SHARED),
    ("farskip", SHARED),
    ("ladder-2", 0),
    ("no-communication", SHARED),
]


# first transfers are longer, then compute
each_pace = pytest.mark.parametrize("flops", [1e12, 2e11, 3e10, 1e10])


@each_pace
@pytest.mark.parametrize("name, shared", CASES)
def test_a_timeline_by_hand(name, shared, flops):
    for times in (1, 2):  # backward: twice the work, the same messages
        found = timeline(config(name, shared=shared), device(flops=flops), times=times)
        assert found.seconds == pytest.approx(expected(name, shared=shared, scale=times / flops))
        alone = expected("no-communication", shared=shared, scale=times / flops)
        assert found.compute == pytest.approx(alone)


def expected_in_turn(*, shared, scale):
    """Seconds of LAYERS layers of two rows, one beside the other's messages."""
    into, out, route, first, last, beside = parts(shared=shared, scale=scale)
    first += beside
    message = SENT  # a dispatch, or a combine
    if shared:
        message += HALF
    attention = max(out, HALF) + max(into, HALF) + route + max(out, message)
    experts = max(first, HALF) + route + max(last, message) + max(first, message)
    between = max(last, HALF) + max(into, message)
    return HALF + into + LAYERS * (attention + experts) + (LAYERS - 1) * between + last + message


@each_pace
@pytest.mark.parametrize(
    "name, shared", [("standard", 0), ("standard", SHARED), ("ladder", SHARED), ("ladder-2", 0)]
)
def test_two_halves_in_turn_by_hand(name, shared, flops):
    for times in (1, 2):
        found = timeline(
            config(name, shared=shared), device(flops=flops), times=times, interleave=2
        )
        assert found.seconds == pytest.approx(expected_in_turn(shared=shared, scale=times / flops))
        assert found.compute == pytest.approx(
            2 * expected("no-communication", shared=shared, scale=times / flops)
        )


def test_where_nothing_is_launched_apart_everything_waits():
    on = replace(machine.load("v5e"), contention=0.0)
    for name in ("standard", "ladder", "farskip"):
        found = timeline(config(name, shared=SHARED), on)
        assert found.seconds == pytest.approx(found.compute + found.wire)


def count(one, interleave):
    """All-to-alls, reduce-scatters and all-gathers of a prefill's layers, without those that nobody
    reads; the embedding has a scatter, and the head a gather.
    """
    definition = nn.define(one, mesh=parallel.make_mesh(tensor=RANKS), experts="exchange")
    program = decode.prefill.__wrapped__(
        definition,
        capacity=TOKENS,
        loop=Loop.UNROLLED,
        sequence_parallel=True,
        interleave=interleave,
    )
    params = weights.abstract(definition, loop=Loop.UNROLLED)
    tokens = jnp.zeros((interleave, TOKENS), jnp.int32)
    traced = jax.make_jaxpr(program)(params, tokens, tokens[:, 0])
    text = str(partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))[0])
    return (
        sum(text.count(f"{kind}[") for kind in ("all_to_all", "reduce_scatter", "all_gather")) - 2
    )


WHOLE = [(*case, None, 1) for case in CASES if case[0] != "no-communication"]
HYBRIDS = [
    ("ladder", SHARED, "2", 1),
    ("ladder", 0, "1", 1),
    ("ladder-2", 0, "0,2", 1),
    ("farskip", SHARED, "1", 1),
]
IN_TURN = [
    ("standard", 0, None, 2),
    ("standard", SHARED, None, 2),
    ("ladder", SHARED, "1", 2),
    ("ladder-2", 0, None, 2),
]


@pytest.mark.parametrize("name, shared, which, interleave", WHOLE + HYBRIDS + IN_TURN)
def test_as_many_transfers_as_the_program_has(name, shared, which, interleave, monkeypatch):
    """A barrier would keep alive what no later step reads; compilers see through it."""
    for module, barrier in (
        (wire, "barrier_forward"),
        (sequence, "barrier_forward"),
        (sequence, "barrier_backward"),
    ):
        monkeypatch.setattr(module, barrier, lambda arrays: arrays)
    one = config(name, shared=shared, which=which)
    found = timeline(one, device(flops=1e12), interleave=interleave)
    assert found.all_reduces == count(one, interleave)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_bytes_round_a_torus(ranks):
    """Message by message: each goes the shorter way round, half of it either way where both are as
    short.
    """
    loads = {(at, way): 0.0 for at in range(ranks) for way in (1, -1)}
    for source, distance in itertools.product(range(ranks), range(1, ranks)):
        ways = [way for way, hops in ((1, distance), (-1, ranks - distance)) if hops <= ranks / 2]
        for way in ways:
            at = source
            for _ in range(min(distance, ranks - distance)):
                loads[at, way] += 1 / ranks / len(ways)
                at = (at + way) % ranks
    heaviest = 2 * max(loads.values())  # either way has half of the link's bandwidth
    torus = Link(latency=3.0, step=0.5, bandwidth=8.0, ring=Ring.TWO_WAY)
    assert torus.all_to_all(16.0, ranks=ranks) == pytest.approx(
        3 + ranks // 2 * 0.5 + heaviest * 16 / 8
    )


def test_an_all_to_all_through_switches():
    switch = Link(latency=3.0, step=0.5, bandwidth=8.0)
    assert switch.all_to_all(16.0, ranks=1) == 0
    assert switch.all_to_all(16.0, ranks=4) == 3.5 + 3 / 4 * 16 / 8
    nodes = replace(switch, network=Network(size=4, step=2.0, bandwidth=1.0))
    assert nodes.all_to_all(16.0, ranks=4) == switch.all_to_all(16.0, ranks=4)
    assert nodes.all_to_all(16.0, ranks=8) == 5.5 + 4 / 8 * 16  # half of the bytes leave the node
    fast = replace(nodes, network=replace(nodes.network, bandwidth=64.0))
    assert fast.all_to_all(16.0, ranks=8) == 5.5 + 3 / 8 * 16 / 8  # what stays is longer


def test_a_training_step_goes_back_the_same_way():
    """Forward, backward with twice the work, and what is alike for all."""
    on = device(flops=3e10)
    settings = dict(phase=Phase.TRAIN, by=Choice(experts=ExpertParallelism.EXCHANGE))

    def alike(name):
        shard = Model(config(name, shared=SHARED), RANKS, trains=True)
        task = Task(shard, on, shard.prefill(rows=1, prompt_length=TOKENS))
        (found,) = model.passes(task, **settings)
        assert found.program.form is Form.EXCHANGE
        return found.seconds - sum(
            expected(name, shared=SHARED, scale=times / 3e10) for times in (1, 2)
        )

    assert alike("standard") == pytest.approx(alike("ladder")) == pytest.approx(alike("farskip"))


WORDS = "--model qwen1.5-moe-a2.7b --hardware h100-nvlink --tensor 4 --layers 4"
PHASES = ["--phase prefill --prompt-length 8192", "--phase train --sequence 8192"]


def form_of(opponent):
    return opponent["form"], opponent["interleave"]


@pytest.mark.parametrize("phase", PHASES)
def test_the_opponent_is_the_strongest_standard_of_both_forms(phase, capsys):
    words = f"{WORDS} {phase} --batch 3 --experts"
    reduced, exchanged = (answered(capsys, f"{words} {form}") for form in ("reduce", "exchange"))
    assert (reduced["experts"], reduced["capacity"]) == ("reduce", None)
    assert (exchanged["experts"], exchanged["capacity"]) == ("exchange", 1.25)
    named = {form_of(one): one["tokens_per_second"] for one in exchanged["opponents"]}
    # a split stream of odd rows: no halves
    of_sums = {("all-reduce", 1), ("all-reduce", 2), ("sequence-parallel", 1)}
    assert named.keys() == of_sums | {("exchange", 1)}
    assert set(map(form_of, reduced["opponents"])) == of_sums  # an exchange may drop rows
    rows = by_residual(exchanged)
    assert {row["form"] for row in rows.values()} == {"exchange"}
    assert list(rows) == ["standard", "ladder", "ladder-2", "no-communication", "farskip"]
    assert "exchange  with capacity 1.25" in run(capsys, f"{words} exchange")


def test_a_model_with_a_capacity_has_both_forms_as_opponents(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("model:\n  preset: qwen1.5-moe-a2.7b\n  moe: {capacity: 2.0}\n")

    def of(model=str(file), tensor=4, **more):
        return request.make(model=model, hardware="v5p", tensor=tensor, phase="prefill", **more)

    reduced = (ExpertParallelism.REDUCE,)
    assert of().forms == tuple(ExpertParallelism)
    assert of(tensor=1).forms == of(prompt_length=1022).forms == reduced
    assert of(model="qwen1.5-moe-a2.7b").forms == of(model="tiny").forms == reduced
    assert of().capacity is None
    exchanged = of(experts=ExpertParallelism.EXCHANGE)
    assert exchanged.capacity == exchanged.config("ladder").moe.capacity == 2.0
    assert of(experts=ExpertParallelism.EXCHANGE, capacity=1.0).capacity == 1.0


@pytest.mark.parametrize("hardware", ["v5p", "h100-nvlink"])
def test_the_guide_has_what_is_predicted(hardware):
    page = (ROOT / "docs/guides/experts.md").read_text()

    def rows(form, **asked):
        asked |= dict(model="qwen3-30b-a3b", hardware=hardware, phase="prefill", experts=form)
        return predict(residual="standard,ladder", **asked).rows

    reduce, exchange = ExpertParallelism
    long = dict(prompt_length=32768)
    two = dict(batch=2, prompt_length=16384)
    whole = dict(interleave=Interleave.WHOLE)
    pace = lambda row: f"{row.tokens_per_second:,.0f}"
    exposed = lambda speed: f"{1e3 * speed.exposed:.0f} of {1e3 * speed.seconds:.0f} ms"

    pairs = zip(*(rows(form, **long, **whole) for form in ExpertParallelism))
    cells = [f"{pace(sums)} | {pace(sent)} ({exposed(sent.speed)})" for sums, sent in pairs]
    assert f"| `{hardware}` | {' | '.join(cells)} |" in page
    halved, _ = rows(reduce, **long)
    standard, ladder = rows(exchange, **two)
    for one in (halved, standard):
        assert one.speed.program.interleave == 2
        assert pace(one) in page
    cells = map(pace, (rows(exchange, **two, **whole)[0], standard, ladder))
    assert f"| `{hardware}` | {' | '.join(cells)} | {ladder.speedup:.2f} |" in page
