"""Experts whose rows are exchanged, in the speed model: transfers and timelines by hand, opponents, refusals."""

import dataclasses
import itertools
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, residual
from ladder_jax.config import ExpertParallelism, Phase, preset
from ladder_jax.predict import layers, machine, model, request, result
from ladder_jax.predict.machine import Link, Network, Ring
from ladder_jax.predict.program import Choice, Form, Program
from ladder_jax.predict.work import TRAINING, Model
from ladder_jax.residual.interleave import interleaved
from ladder_jax.residual.wires import exchange as wire
from ladder_jax.residual.wires import sequence
from ladder_jax.residual.wires.exchange import Exchange
from tests.predict.asked import H100, answered, run

# tokens of all ranks
RANKS = 4
TOKENS = 256
LAYERS = 3
D, HEADS, KEYS, HEAD, VOCABULARY = 64, 8, 4, 16, 512
E, K, M, SHARED, CAPACITY = 6, 2, 48, 32, 1.5  # experts, of which two fill up: 8
PER_RANK = TOKENS // RANKS
SLOTS = math.ceil(CAPACITY * PER_RANK * K / E)  # 32
ROWS = 8 * SLOTS
BANDWIDTH = 1e9  # of the link, bytes a second

V5P = machine.load("v5p")


def config(name, *, shared=0, which=None):
    moe = dict(experts=E, top_k=K, expert_width=M, shared_width=shared, capacity=CAPACITY)
    shape = dict(num_layers=LAYERS, d_model=D, num_heads=HEADS, num_kv_heads=KEYS, head_dim=HEAD)
    return preset("tiny-moe", residual=name, ladder_layers=which, vocab_size=VOCABULARY, moe=moe, **shape)


def device(*, flops=math.inf, bandwidth=math.inf, **changes):
    """Without launches, contention and latencies."""
    of_link = Link(latency=0.0, step=0.0, bandwidth=BANDWIDTH)
    shares = dict(flops_share=1.0, bandwidth_share=1.0, launch=0.0, contention=0.0)
    return dataclasses.replace(H100, flops=flops, bandwidth=bandwidth, link=of_link, **shares | changes)


def timeline(one, on, *, times=1, interleave=1):
    """Of one row, or of two rows in turn."""
    shard = Model(one, RANKS)
    block = shard.prefill(rows=interleave, prompt_length=TOKENS)
    program = Program(Form.EXCHANGE, interleave=interleave)
    return layers.layers(shard, on, block, program=program, times=times).timeline


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
    shared_first=2 * TOKENS * D * 2 * SHARED // RANKS,
    shared_last=2 * TOKENS * D * SHARED // RANKS,
)


def expected(name, *, shared, scale):
    """Seconds of LAYERS layers; `scale`: of a FLOP."""
    c = {part: scale * flops for part, flops in FLOPS.items()}
    s = c["shared_first"] + c["shared_last"] if shared else 0.0
    compute = c["into"] + c["out"] + c["route"] + c["first"] + c["last"] + s
    if name == "no-communication":
        return LAYERS * compute
    if name == "standard":
        sent = [max(c["shared_first"], SENT), max(c["shared_last"], SENT)] if shared else [SENT, SENT]
        return LAYERS * (compute - s + 2 * HALF + sum(sent) + (2 * HALF if shared else 0))
    # A ladder: `early` is what farskip computes before attention's sum is sent, `beside` what others compute beside it.
    early, beside = (s, 0.0) if name == "farskip" else (0.0, s)
    combine = SENT + (HALF if shared and name != "farskip" else 0)
    dispatch = SENT + (HALF if shared else 0)
    first_layer = HALF + c["into"]
    others = (LAYERS - 1) * (max(c["into"], combine) + max(c["last"], HALF))
    each = LAYERS * (c["route"] + max(c["out"], dispatch) + early + max(c["first"] + beside, HALF))
    return first_layer + others + each + c["last"] + combine


CASES = [("standard", 0), ("standard", SHARED), ("ladder", 0), ("ladder", SHARED), ("farskip", SHARED)]
CASES += [("ladder-2", 0), ("no-communication", SHARED)]


@pytest.mark.parametrize("flops", [1e12, 2e11, 3e10, 1e10])  # first transfers are longer, then compute
@pytest.mark.parametrize(("name", "shared"), CASES)
def test_a_timeline_by_hand(name, shared, flops):
    for times in (1, 2):  # backward: twice the work, the same messages
        found = timeline(config(name, shared=shared), device(flops=flops), times=times)
        assert found.seconds == pytest.approx(expected(name, shared=shared, scale=times / flops))
        alone = expected("no-communication", shared=shared, scale=times / flops)
        assert found.compute == pytest.approx(alone)
        assert found.exposed == pytest.approx(found.seconds - alone)
    transfers = {"standard": 4 + 2 * bool(shared), "no-communication": 0, "farskip": 5, "ladder": 4 + 2 * bool(shared)}
    assert found.all_reduces == LAYERS * transfers.get(name, 4)


def expected_in_turn(*, shared, scale):
    """Seconds of LAYERS layers of two rows, one beside the other's messages."""
    c = {part: scale * flops for part, flops in FLOPS.items()}
    first = c["first"] + (c["shared_first"] + c["shared_last"] if shared else 0.0)
    message = SENT + (HALF if shared else 0.0)  # a dispatch, or a combine
    attention = [max(c["out"], HALF), max(c["into"], HALF), c["route"], max(c["out"], message)]
    experts = [max(first, HALF), c["route"], max(c["last"], message), max(first, message)]
    between = (LAYERS - 1) * (max(c["last"], HALF) + max(c["into"], message))  # two layers
    return HALF + c["into"] + LAYERS * sum(attention + experts) + between + c["last"] + message


@pytest.mark.parametrize("flops", [1e12, 2e11, 3e10, 1e10])
@pytest.mark.parametrize(
    ("name", "shared"), [("standard", 0), ("standard", SHARED), ("ladder", SHARED), ("ladder-2", 0)]
)
def test_two_halves_in_turn_by_hand(name, shared, flops):
    for times in (1, 2):
        found = timeline(config(name, shared=shared), device(flops=flops), times=times, interleave=2)
        assert found.seconds == pytest.approx(expected_in_turn(shared=shared, scale=times / flops))
        assert found.compute == pytest.approx(2 * expected("no-communication", shared=shared, scale=times / flops))
    assert found.all_reduces == LAYERS * 2 * (6 if shared else 4)


def test_what_a_device_reads_and_writes():
    """All matrices of its experts, and whole buffers, for any load; norms, router and sorting of its own tokens."""
    found = timeline(config("no-communication", shared=SHARED), device(bandwidth=1e9))
    read = D * (QUERIES + 2 * CACHED) + QUERIES * D + 8 / RANKS * 3 * D * M + 3 * D * SHARED // RANKS
    norms = 2 * (4 * PER_RANK * D * 2 + 4 * D)
    attention = TOKENS * (D + QUERIES + 2 * CACHED + 2 * (QUERIES + 2 * CACHED) + QUERIES + D) + 2 * TOKENS * CACHED
    routed = 2 * ROWS * D + ROWS * (D + 2 * M + 3 * M + M + D) + 3 * PER_RANK * K * D + PER_RANK * D
    shared = TOKENS * (2 * D + (2 + 3 + 1) * SHARED // RANKS)
    router = 4 * D * E + 2 * PER_RANK * D
    assert found.seconds == pytest.approx(LAYERS * (2 * (read + attention + routed + shared) + norms + router) / 1e9)


def test_compute_slows_beside_a_transfer():
    slow, fast = (timeline(config("ladder"), device(flops=1e10, contention=value)) for value in (0.5, 0.0))
    spans = [bar.stop - bar.start for bar in fast.bars if bar.wire][1:-1]  # all but the first and the last are hidden
    assert slow.seconds - fast.seconds == pytest.approx(sum(spans) * (1 - 1 / 1.5))


def test_where_nothing_is_launched_apart_everything_waits():
    on = dataclasses.replace(machine.load("v5e"), contention=0.0)
    for name in ("standard", "ladder", "farskip"):
        found = timeline(config(name, shared=SHARED), on)
        assert found.seconds == pytest.approx(found.compute + found.wire)


def count(name, shared, which, interleave):
    """(all-to-alls, reduce-scatters, all-gathers) of the program's layers, without those that nobody reads."""
    one = config(name, shared=shared, which=which)
    topology = residual.of_model(one)

    def route(x):
        tokens = x.reshape(-1, D)
        slots = parallel.pvary(jnp.zeros((len(tokens), K), jnp.int32), ("tensor",))
        return tokens, slots, slots.astype(jnp.float32)

    compute = lambda rows, tied=lambda x: x: tied(rows).transpose(1, 0, 2)
    attention = lambda x, projections: projections.into(lambda x, _: 2 * x)(x, None)
    shared = lambda x, tied=lambda x: x: tied(x + 1)
    sublayers = attention, types.SimpleNamespace(route=route, compute=compute, shared=shared)

    def forward(x):
        over = interleaved(Exchange(("tensor",), lambda x: x, one.moe), interleave, rows=interleave)
        steps = list(itertools.chain.from_iterable(over.layers(topology.layers)))
        state = over.begin(x, steps[0])
        for step in steps:
            state = over.advance(state, step, sublayers if interleave == 1 else (sublayers, sublayers))
        return over.flush(state) if state.partial is not None else state.residual

    spec = P(None, "tensor")
    mesh = parallel.make_mesh(tensor=RANKS)
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=spec, out_specs=spec)
    traced = jax.make_jaxpr(mapped)(jnp.ones((interleave, TOKENS, D)))
    text = str(partial_eval.dce_jaxpr(traced.jaxpr, [True])[0])
    return [text.count(f"{kind}[") for kind in ("all_to_all", "reduce_scatter", "all_gather")]


WHOLE = [(name, shared, None, 1) for name, shared in CASES[:-1]]
HYBRIDS = [("ladder", SHARED, "2", 1), ("ladder", 0, "1", 1), ("ladder-2", 0, "0,2", 1), ("farskip", SHARED, "1", 1)]
IN_TURN = [
    ("standard", 0, None, 2),
    ("standard", SHARED, None, 2),
    ("ladder", SHARED, "1", 2),
    ("ladder-2", 0, None, 2),
]


@pytest.mark.parametrize(("name", "shared", "which", "interleave"), WHOLE + HYBRIDS + IN_TURN)
def test_as_many_transfers_as_the_program_has(name, shared, which, interleave, monkeypatch):
    """A barrier would keep alive what no later step reads; compilers see through it."""
    for module, barrier in ((wire, "barrier_forward"), (sequence, "barrier_forward"), (sequence, "barrier_backward")):
        monkeypatch.setattr(module, barrier, lambda arrays: arrays)
    found = timeline(config(name, shared=shared, which=which), device(flops=1e12), interleave=interleave)
    wires = [bar.name for bar in found.bars if bar.wire]
    kinds = {"all_to_all": ("dispatch", "combine"), "reduce_scatter": ("reduce-scatter",), "all_gather": ("gather",)}
    counted = [sum(wires.count(name) for name in names) for names in kinds.values()]
    assert counted == count(name, shared, which, interleave)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_bytes_round_a_torus(ranks):
    """Message by message: each goes the shorter way round, half of it either way where both are as short."""
    loads = {(at, way): 0.0 for at in range(ranks) for way in (1, -1)}
    for source, distance in itertools.product(range(ranks), range(1, ranks)):
        ways = [way for way, hops in ((1, distance), (-1, ranks - distance)) if hops <= ranks / 2]
        for way in ways:
            at = source
            for _ in range(min(distance, ranks - distance)):
                loads[at, way] += 1 / ranks / len(ways)
                at = (at + way) % ranks
    # of the link's bandwidth each has half
    heaviest = max(loads.values())
    directions = 2
    assert machine.crossings(ranks, ring=Ring.TWO_WAY) == pytest.approx(directions * heaviest)
    torus = Link(latency=3.0, step=0.5, bandwidth=8.0, ring=Ring.TWO_WAY)
    assert torus.all_to_all(16.0, ranks=ranks) == pytest.approx(3 + ranks // 2 * 0.5 + 2 * heaviest * 16 / 8)


def test_an_all_to_all_through_switches():
    switch = Link(latency=3.0, step=0.5, bandwidth=8.0)
    assert switch.all_to_all(16.0, ranks=1) == 0
    assert switch.all_to_all(16.0, ranks=4) == 3.5 + 3 / 4 * 16 / 8
    nodes = dataclasses.replace(switch, network=Network(size=4, step=2.0, bandwidth=1.0))
    assert nodes.all_to_all(16.0, ranks=4) == switch.all_to_all(16.0, ranks=4)
    assert nodes.all_to_all(16.0, ranks=8) == 5.5 + 4 / 8 * 16  # half of the bytes leave the node
    fast = dataclasses.replace(nodes, network=dataclasses.replace(nodes.network, bandwidth=64.0))
    assert fast.all_to_all(16.0, ranks=8) == 5.5 + 3 / 8 * 16 / 8  # what stays is longer


def test_a_training_step_goes_back_the_same_way():
    """Forward, backward with twice the work, and what is alike for all."""
    on = device(flops=3e10)
    seconds = {}
    settings = dict(phase=Phase.TRAIN, choice=Choice(experts=ExpertParallelism.EXCHANGE))
    for name, shared in (("standard", SHARED), ("ladder", SHARED), ("farskip", SHARED)):
        shard = Model(config(name, shared=shared), RANKS, TRAINING)
        (found,) = model.passes(shard, on, shard.prefill(rows=1, prompt_length=TOKENS), **settings)
        both = [expected(name, shared=shared, scale=times / 3e10) for times in (1, 2)]
        assert found.program.form is Form.EXCHANGE
        seconds[name] = found.seconds - sum(both)
    assert seconds["standard"] == pytest.approx(seconds["ladder"]) == pytest.approx(seconds["farskip"])


WORDS = ("--model", "qwen1.5-moe-a2.7b", "--hardware", "h100-nvlink", "--tensor", 4, "--layers", 4)


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_the_opponent_is_the_strongest_standard_of_both_forms(phase, capsys):
    words = (*WORDS, "--phase", phase, "--batch", 3, "--sequence" if phase == "train" else "--prompt-length", 8192)
    found = {}
    for form in ("reduce", "exchange"):
        found[form] = answered(capsys, *words, "--experts", form)
        assert found[form]["experts"] == form
    reduced = found["reduce"]
    exchanged = found["exchange"]
    assert (reduced["capacity"], exchanged["capacity"]) == (None, 1.25)
    assert {row["form"] for row in exchanged["rows"]} == {"exchange"}
    assert [row["residual"] for row in exchanged["rows"]] == [
        *("standard", "ladder", "ladder-2", "no-communication", "farskip")
    ]
    named = {(one["form"], one["interleave"]): one["tokens_per_second"] for one in exchanged["opponents"]}
    whole = {("all-reduce", 1), ("sequence-parallel", 1)}
    assert set(named) == {*whole, ("all-reduce", 2), ("sequence-parallel", 2), ("exchange", 1)}
    found = {(one["form"], one["interleave"]) for one in reduced["opponents"]}
    assert found == set(named) - {("exchange", 1)}  # which may drop rows
    assert exchanged["baseline"] == exchanged["opponents"][0]
    assert named["exchange", 1] > max(named[one] for one in whole)
    rows = {row["residual"]: row for row in exchanged["rows"]}
    assert rows["standard"]["tokens_per_second"] == pytest.approx(named["exchange", 1])
    speeds = [rows[name]["speedup"] for name in ("standard", "ladder", "farskip", "no-communication")]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1
    assert (rows["standard"]["launch"], rows["farskip"]["launch"]) == (None, "chained")
    assert 0 < rows["standard"]["hidden_fraction"] < rows["farskip"]["hidden_fraction"] < 1  # beside the shared expert
    _, out, _ = run(capsys, *words, "--experts", "exchange")
    assert f"speed-up: over Standard ({exchanged['baseline']['form']}" in out
    assert "exchange  with capacity 1.25" in out


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_halves_of_exchanged_experts_are_an_opponent(phase, capsys):
    words = (*WORDS, "--phase", phase, "--experts", "exchange", "--sequence" if phase == "train" else "--prompt-length")
    words = (*words, 8192, "--batch", 2)
    found = {interleave: answered(capsys, *words, "--interleave", interleave) for interleave in ("1", "2", "auto")}
    rows = {key: {row["residual"]: row for row in one["rows"]} for key, one in found.items()}
    (halves,) = [one for one in found["auto"]["opponents"] if (one["form"], one["interleave"]) == ("exchange", 2)]
    assert found["auto"]["baseline"] == halves
    standard = rows["2"]["standard"]
    assert standard["interleave"] == 2
    assert standard["tokens_per_second"] == pytest.approx(halves["tokens_per_second"])
    assert rows["1"]["standard"]["interleave"] == 1
    assert standard["hidden_fraction"] > rows["1"]["standard"]["hidden_fraction"]
    assert standard["tokens_per_second"] > rows["1"]["standard"]["tokens_per_second"]
    for name, row in rows["auto"].items():
        assert row["tokens_per_second"] == max(rows[one][name]["tokens_per_second"] for one in ("1", "2"))
    assert rows["2"]["no-communication"]["interleave"] == rows["2"]["farskip"]["interleave"] == 1  # without halves


def test_odd_rows_of_exchanged_experts_have_no_halves(capsys):
    words = (*WORDS, "--phase", "prefill", "--experts", "exchange", "--residual", "standard")
    status, _, said = run(capsys, *words, "--interleave", 2, "--batch", 3)
    assert status == 2
    assert "--interleave 2 halves the rows of a split stream, and --batch gives 3: an odd" in said


def test_a_model_with_a_capacity_has_both_forms_as_opponents(tmp_path):
    moe = "model:\n  preset: qwen1.5-moe-a2.7b\n  moe: {capacity: 2.0}\n"
    (tmp_path / "a.yaml").write_text(moe)
    of = lambda **more: request.make(
        **{"model": str(tmp_path / "a.yaml"), "hardware": "v5p", "tensor": 4, "phase": "prefill", **more}
    )
    both = tuple(ExpertParallelism)
    reduced = (ExpertParallelism.REDUCE,)
    assert of().forms == both
    assert of().capacity is None
    assert of(experts="exchange").capacity == 2.0
    assert of(experts="exchange", capacity=1.0).capacity == 1.0
    assert of(tensor=1).forms == of(prompt_length=1022).forms == reduced
    assert of(model="qwen1.5-moe-a2.7b").forms == of(model="tiny").forms == reduced
    assert of(experts="exchange").config("ladder").moe == dataclasses.replace(of().config("ladder").moe, capacity=2.0)


def test_the_guide_has_what_is_predicted():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "guides" / "experts.md").read_text()
    for hardware in ("v5p", "h100-nvlink"):
        cells = []
        for name, form in itertools.product(("standard", "ladder"), ("reduce", "exchange")):
            words = dict(model="qwen3-30b-a3b", tensor=8, phase="prefill", prompt_length=32768, residual=name)
            asked = dict(words, hardware=hardware, experts=form)
            (row,) = result.predict(request.make(**asked, interleave="1")).rows
            milliseconds = f" ({row.speed.exposed * 1e3:.0f} of {row.speed.seconds * 1e3:.0f} ms)"
            cells.append(f"{row.tokens_per_second:,.0f}" + (milliseconds if form == "exchange" else ""))
            if (name, form) == ("standard", "reduce"):
                (halved,) = result.predict(request.make(**asked)).rows
        assert f"| `{hardware}` | {' | '.join(cells)} |" in page
        assert halved.speed.program.interleave == 2
        assert f"{halved.tokens_per_second:,.0f}" in page
        asked = dict(words, hardware=hardware, batch=2, prompt_length=16384, residual="standard,ladder")
        standard, ladder = result.predict(request.make(**asked, experts="exchange")).rows
        (whole, _) = result.predict(request.make(**asked, experts="exchange", interleave="1")).rows
        assert standard.speed.program.interleave == 2
        cells = [f"{one.tokens_per_second:,.0f}" for one in (whole, standard, ladder)]
        assert f"| `{hardware}` | {' | '.join(cells)} | {ladder.speedup:.2f} |" in page
