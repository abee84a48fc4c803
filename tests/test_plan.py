"""`ladder-jax plan`: what it proposes can be run, its estimates are near the compilers' figures."""

import dataclasses
import json
import math
import re
from dataclasses import replace

import jax
import pytest

from experiments import study
from experiments.plan import __main__ as plan_study
from ladder_jax import cli, nn, parallel
from ladder_jax.config import (
    CollectiveMatmul,
    ExpertParallelism,
    Interleave,
    Loop,
    MeshConfig,
    Remat,
    load,
)
from ladder_jax.plan import confirm, memory, plans, request, speed
from ladder_jax.plan.confirm import Confirmed
from ladder_jax.plan.request import Candidate
from ladder_jax.predict.machine import Link, Machine
from ladder_jax.schedule import targets
from ladder_jax.train.run import _memory_explained
from tests import cases
from tests.changed import ROOT
from tests.refusals import refused

LARGE = dict(model="llama-3-70b", target="v5p:4x4x4", tokens=4_194_304, sequence=8192)
FEW = dict(model="llama-3-70b", target="v5p:2x2x2", tokens=512, sequence=256)
REDUCED = Candidate(None, MeshConfig(4, 4, 4), Remat.SAVE_MATMULS, False, 2, 16)
MOE = dict(model="qwen1.5-moe-a2.7b", target="v5p:2x2x2", tokens=65_536, sequence=4096, layers=4)
EXCHANGED = Candidate(
    None, MeshConfig(fsdp=2, tensor=4, experts="exchange"), Remat.NONE, True, 2, 4
)
ROWS = 60 * math.ceil(1.25 * 2048 * 4 / 60)  # of a device: 2,048 tokens, of 60 experts 4 each
COMPILED = study.load(plan_study.HERE / "results.json")["rows"]
TOLERANCE = 0.2


@pytest.mark.parametrize(
    "row", COMPILED, ids=lambda row: f"{row['model']}-{row['layers']}-{row['remat']}"
)
def test_estimates_are_near_what_compilers_take(row):
    found = memory.estimate(plan_study.candidate(row))
    assert found.device == pytest.approx(row["bytes_per_device"], rel=TOLERANCE)
    assert found.host == pytest.approx(row["host_bytes"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "asked", [LARGE, dict(model="tiny", target="cpu:8", tokens=8192, sequence=512)]
)
def test_every_plan_can_be_run(asked):
    """Its overrides make a configuration, of that many tokens, on as many devices as there are."""
    wanted = request.make(**asked)
    for plan in plans.answer(wanted, compiled=0).plans[::7]:
        config = configured(plan.candidate)
        assert config.mesh.size == wanted.target.count
        assert config.train.batch * config.train.sequence == asked["tokens"]
        assert (
            config.train.batch
            == plan.candidate.rows * plan.candidate.accumulate * config.mesh.data * config.mesh.fsdp
        )


def test_a_plan_of_a_file_replaces_what_the_file_says_of_the_mesh_and_the_stream(tmp_path):
    file = tmp_path / "mine.yaml"
    split = "sequence_parallel: true, collective_matmul: ring, loop: unrolled, start: base"
    file.write_text(f"model: {{preset: tiny}}\nmesh: {{data: 2, tensor: 4}}\ntrain: {{{split}}}")
    wanted = request.make(model=str(file), target="cpu:8", tokens=8192, sequence=512)
    for one in request.candidates(wanted)[::50]:
        train = configured(one).train
        assert train.loop is Loop.UNROLLED is one.run().train.loop
        assert train.collective_matmul is CollectiveMatmul.NONE


@pytest.mark.parametrize(
    "setting, sections",
    {
        "train.freeze=1": "train: {start: base, freeze: 1}",
        "lora.rank=8": "train: {start: base}\nlora: {rank: 8}",
        "distill.teacher=other": "distill: {teacher: other}",
        "conversion.steps=9": "conversion: {steps: 9}",
    }.items(),
)
def test_a_file_that_trains_less_or_on_more_is_refused(setting, sections, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{preset: tiny, residual: ladder}}\n{sections}")
    with refused(f"plan does not count {setting} of {re.escape(str(file))} .allowed: all"):
        request.make(model=str(file), target="cpu:8", tokens=8192, sequence=512)


def configured(candidate):
    """The configuration that its overrides make."""
    overrides = [f"{name}={value}" for name, value in candidate.overrides.items()]
    config = load(candidate.request.name, overrides=overrides)
    check(config, candidate)
    return config


def check(config, candidate):
    """It trains as the candidate says."""
    planned = candidate.run().train
    assert config.mesh == candidate.mesh
    for name in ("batch", "sequence", "remat", "accumulate", "sequence_parallel", "interleave"):
        assert getattr(config.train, name) == getattr(planned, name)


def candidates(**asked):
    return set(request.candidates(request.make(**asked)))


def exchanging(**changes):
    """The candidates that exchange experts' rows."""
    return {one for one in candidates(**{**MOE, "capacity": 1.25, **changes}) if one.exchanges}


def test_halves_are_a_candidate_where_they_have_something_to_hide():
    standard = dict(LARGE, residual="standard")
    every = candidates(**standard)
    halved = {one for one in every if one.interleave == 2}
    assert halved
    assert all(one.mesh.tensor > 1 and one.rows % 2 == 0 for one in halved)
    asked = candidates(**standard, interleave=Interleave.HALVES)
    shapes = lambda found: {dataclasses.replace(one, request=None) for one in found}
    assert shapes(asked) == shapes(halved)
    assert {one.interleave for one in candidates(**LARGE, residual="no-communication")} == {1}
    assert {one.interleave for one in exchanging()} == {1, 2}
    # shared: with attention
    assert {one.interleave for one in exchanging(residual="farskip")} == {1}


def timed(candidate):
    return speed.speed(candidate, memory.estimate(candidate))


@pytest.mark.parametrize(
    "asked, whole, least, most",
    [
        (dict(LARGE, residual="standard"), REDUCED, 0, 0.97),
        (LARGE, REDUCED, 1, 1.01),  # of a Ladder all is hidden as it is
        (FEW, Candidate(None, MeshConfig(tensor=8), Remat.NONE, False, 2, 1), 1.05, 2),
        (dict(MOE, capacity=1.25, residual="standard"), EXCHANGED, 0, 1),
    ],
)
def test_what_halves_take(asked, whole, least, most):
    """Of the whole microbatch's time; they hide what Standard waits for, and cost at few rows."""
    whole = replace(whole, request=request.make(**asked))
    halves = replace(whole, interleave=2)
    assert least < timed(halves).seconds / timed(whole).seconds < most
    assert memory.estimate(whole) == memory.estimate(halves)


def asked_of(prints, asked, *options):
    """The command's output, without compiling."""
    words = [f"--{name}={value}" for name, value in asked.items()]
    return prints("plan", *words, "--confirm=0", *options)


def planned(*asked):
    return json.loads(asked_of(*asked, "--json"))["plans"]


def test_standard_is_planned_in_halves(prints):
    standard = dict(LARGE, residual="standard")
    every = planned(prints, standard)
    assert next(plan for plan in every if plan["mesh"]["tensor"] > 1)["interleave"] == 2
    forms = {(plan["interleave"], plan["overrides"].get("train.interleave")) for plan in every}
    assert forms == {(1, None), (2, "2")}
    assert ", in turn" in asked_of(prints, standard)
    assert {plan["interleave"] for plan in planned(prints, standard, "--interleave=1")} == {1}


def test_plans_that_exchange_experts():
    """Of a model with a capacity, each sequence-parallel plan has one; its overrides make a
    training configuration.
    """
    asked = dict(MOE, capacity=1.25, residual="farskip")
    exchanged = exchanging(residual="farskip")
    split = [one for one in candidates(**asked) if one.sequence_parallel and not one.exchanges]
    reduces = lambda one: replace(one.mesh, experts=ExpertParallelism.REDUCE)
    assert {replace(one, mesh=reduces(one)) for one in exchanged} == set(split)
    for one in sorted(exchanged, key=str)[::9]:
        assert configured(one).model == one.request.config


def test_plans_that_exchange_no_experts(tmp_path):
    dense = tmp_path / "dense.yaml"
    dense.write_text("model: {preset: tiny-moe, d_ff: 64, moe: {dense_layers: 1}}")
    assert not exchanging(capacity=None)
    assert not exchanging(residual="parallel")
    assert not exchanging(model=str(dense))


def test_what_exchanged_experts_compute_again_by_hand():
    """All but the head, and the sums that are reduced: of attention and the shared expert. The
    router counts once forward, and on each rank again.
    """
    tokens = 2 * 4096
    d = 2048
    none = replace(EXCHANGED, request=request.make(**MOE, capacity=1.25, residual="ladder"))
    forward, recomputed = speed.flops(none)
    head = 2 * tokens * none.request.config.vocab_size / 4 * d
    reduced = 2 * tokens * d * 512 + 2 * tokens * d * 5632 / 4
    full = replace(none, remat=Remat.FULL)
    copies = 2 * tokens * d * 60 * 3 / 4
    again = pytest.approx(forward - head - 4 * reduced + 4 * copies)
    assert recomputed == 0
    assert speed.flops(full) == (forward, again)


LINK = Link(latency=0.0, step=0.0, bandwidth=1e9)
BARE = dict(
    memory=1.0, bandwidth=1e30, flops_share=1.0, bandwidth_share=1.0, launch=0.0, contention=0.0
)


@pytest.fixture
def on(monkeypatch):
    """Plan for a machine without latencies: bytes over its links, or operations, of so many a
    second.
    """

    def set_(*, flops=1e30):
        machine = Machine("plain", 8, flops=flops, link=LINK, **BARE)
        monkeypatch.setattr(speed, "machine_of", lambda target: machine)

    return set_


DENSE = dict(model="llama-3-8b", target="v5p:2x2x2", tokens=16_384, sequence=1024, layers=2)
TOKENS = 2048  # of two sequences
LAYER = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14_336
TABLES = 2 * 128_256 * 4096


def dense(mesh, *, residual="standard", remat=Remat.NONE, split=False):
    """A candidate of two sequences at a time on 8 devices."""
    accumulate = 8 // (mesh.data * mesh.fsdp)
    wanted = request.make(**DENSE, residual=residual)
    return Candidate(wanted, mesh, remat, split, 2, accumulate)


@pytest.mark.parametrize(
    "residual, split, reduced",
    [
        ("standard", False, 4),
        ("ladder", False, 4),
        ("parallel", False, 2),
        ("standard", True, 4),
        ("ladder", True, 4),
    ],
)
def test_the_transfers_of_a_step_by_hand(on, residual, split, reduced):
    """2 x 2 x 2 devices that compute in no time. reduced: outputs of two layers.

    A reduction is two halves forward and two backward, where an input is gathered once more in
    every second one. Weights of bfloat16 are gathered twice, gradients of float32 reduced.
    """
    on()
    remat = Remat.FULL
    candidate = dense(MeshConfig(2, 2, 2), residual=residual, remat=remat, split=split)
    half = TOKENS * 4096 * 2 / 2
    of_layers = reduced * (4.5 if split else 4) * half
    ends = 2 * 2 * half + 3 * 4 * TOKENS
    held = (2 * LAYER + TABLES) / 2
    weights = (2 + 2 + 4) * held / 2
    gradients = 4 * held / 2
    found = timed(candidate)
    transferred = 2 * (of_layers + ends + weights) + gradients
    assert found.seconds == pytest.approx(transferred / 1e9, rel=1e-4)
    assert found.exposed == pytest.approx(found.seconds)


def test_the_operations_of_recomputation_by_hand(on):
    """Without transfers. Reduced sums are kept, and so attention's and the MLP's last products."""
    on(flops=1e12)
    kinds = (Remat.NONE, Remat.SAVE_MATMULS, Remat.FULL)
    none, save, full = (timed(dense(MeshConfig(8), remat=one)) for one in kinds)
    scores = 2 * 4 * TOKENS * 4096 * 1025 / 2
    products = 2 * 2 * TOKENS * 4096 * (4096 + 2 * 1024 + 2 * 14_336)
    gradients = 2 * 7 / 8 * 4 * (2 * LAYER + TABLES) / 1e9
    layers = 2 * 2 * TOKENS * LAYER + scores
    forward = layers + 2 * TOKENS * 4096 * 128_256
    assert none.seconds == pytest.approx(3 * forward / 1e12 + gradients)
    assert none.exposed == pytest.approx(gradients)
    assert save.seconds - none.seconds == pytest.approx(scores / 1e12)
    assert full.seconds - none.seconds == pytest.approx((scores + products) / 1e12)
    assert full.recomputed == pytest.approx((scores + products) / (3 * forward))
    assert full.mfu == pytest.approx(3 * forward / 1e12 / full.seconds)
    copied = dense(MeshConfig(tensor=16))  # each of 8 key/value heads twice
    assert 16 * speed.flops(copied)[0] == pytest.approx(forward)


@pytest.mark.parametrize("rate", [1e6, 1e12])
def test_copies_to_the_host_by_hand(on, monkeypatch, rate):
    """They begin with the microbatch, and go both ways."""
    on(flops=1e12)
    monkeypatch.setitem(speed.HOST, "tpu", rate)
    full, offload = (timed(dense(MeshConfig(8), remat=one)) for one in (Remat.FULL, Remat.OFFLOAD))
    candidate = dense(MeshConfig(8), remat=Remat.OFFLOAD)
    copied = 2 * memory.estimate(candidate).host / rate
    computed = full.seconds - full.exposed
    assert offload.seconds == pytest.approx(full.seconds + max(0.0, copied - computed))


def test_an_axis_between_nodes_has_the_networks_bandwidth():
    machine = speed.machine_of(targets.parse("h100:16"))
    assert speed._link(machine, within=8) == machine.link
    between = speed._link(machine, within=16).half(1e12, ranks=2)
    assert between == pytest.approx(1e12 / 2 / 50e9, rel=1e-3)


def test_what_recomputation_of_exchanged_experts_sends_again_by_hand(on):
    """Over 4 ranks: gathers of attention and the shared expert, and of rows as many messages as
    there are ways. What is sent once is in tests/predict/test_exchange.py.
    """
    on()
    half = 3 / 4 * 8192 * 2048 * 2
    rows = 3 / 4 * ROWS * 2048 * 2
    none = replace(EXCHANGED, request=request.make(**MOE, capacity=1.25, residual="standard"))
    once, again = (timed(one).seconds for one in (none, replace(none, remat=Remat.FULL)))
    assert again - once == pytest.approx(4 * 4 * (half + 2 * rows) / 1e9)


def test_an_exchange_is_a_setting(prints):
    every = planned(prints, MOE, "--capacity=1.25")
    forms = {(plan["experts"], plan["overrides"].get("mesh.experts")) for plan in every}
    assert forms == {("exchange", "exchange"), ("reduce", None)}
    assert {plan["overrides"]["model.moe.capacity"] for plan in every} == {"1.25"}


def test_an_exchange_is_confirmed_as_such(tmp_path, monkeypatch):
    """What `confirm` writes for the compiling process, that process makes a definition of."""
    defined = []
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(
        confirm.compiling, "apart", lambda function, step, **_: confirm.measure(step)
    )
    monkeypatch.setattr(
        nn, "define", lambda config, **more: defined.append((config, more["experts"])) or 1 / 0
    )
    wanted = request.make(
        model="tiny-moe", target="cpu:2", tokens=256, sequence=64, layers=1, capacity=2.0
    )
    for form in ExpertParallelism:
        one = Candidate(wanted, MeshConfig(tensor=2, experts=form), Remat.NONE, True, 4, 1)
        with pytest.raises(ZeroDivisionError):
            confirm.confirm(one)
    assert defined == [(wanted.config, form) for form in ExpertParallelism]


def test_meshes_lie_along_the_torus():
    wanted = request.make(**LARGE)
    sizes = {(mesh.data, mesh.fsdp, mesh.tensor) for mesh in request.meshes_of(wanted)}
    assert {(1, 16, 4), (4, 4, 4), (1, 64, 1), (1, 1, 64)} <= sizes
    assert sizes.isdisjoint({(1, 8, 8), (2, 8, 4)})


def test_a_mesh_that_cuts_across_the_torus_is_made_with_a_warning(monkeypatch, caplog):
    """As jax answers for 8 x 8 over 4 x 4 x 4 chips, whose sides make 4 and 16."""

    def no_such_axes(*args, **settings):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 8")

    monkeypatch.setattr(jax, "make_mesh", no_such_axes)
    assert dict(parallel.make_mesh(fsdp=2, tensor=4).shape) == {"data": 1, "fsdp": 2, "tensor": 4}
    assert "mesh 1 x 2 x 4 cuts across the axes" in caplog.text


def test_the_recipe_is_the_recommended_plan():
    config = load(ROOT / "experiments/pretrain/recipes/llama-3-70b.yaml")
    wanted = request.make(**LARGE)
    best = plans.answer(wanted, compiled=0).plans[0]
    assert best.fits
    assert config.model == wanted.config
    check(config, best.candidate)


def test_what_the_compiler_refuses_gives_way_to_the_next(monkeypatch):
    compiled = lambda size, refusal=None: Confirmed(
        size, 0, 0, 0, 0, 1.0, 1.0, "0", "none", refusal
    )
    answers = [
        compiled(0, "RESOURCE_EXHAUSTED: used 100 of 95"),
        compiled(96 * 2**30),
        compiled(90 * 2**30),
    ]
    asked = []
    confirm = lambda candidate: asked.append(candidate) or answers[len(asked) - 1]
    monkeypatch.setattr(plans, "confirm", confirm)
    found = plans.answer(request.make(**LARGE), compiled=1)
    assert [plan.candidate for plan in found.refused] == asked[:2]
    assert found.plans[0].candidate == asked[2]
    lines = [line for line in found.lines() if isinstance(line, str)]
    assert "it fits (90.0 GiB, compiled)" in lines[1]
    assert sum("too large" in line for line in lines) == 2


def test_nothing_fits():
    wanted = request.make(model="llama-3.1-405b", target="v5e:2x2", tokens=4096, sequence=2048)
    found = plans.answer(wanted, compiled=1)
    cure, reason, *_ = found.lines()
    assert found.plans == ()
    assert cure.startswith("nothing fits: take more devices")
    assert " candidates the small" in reason


@pytest.mark.usefixtures("compiled_here")
def test_a_confirmed_answer(capsys, prints):
    ask = "plan --model tiny --target cpu:8 --tokens 256 --sequence 32 --layers 1".split()
    said = prints(*ask, "--json")
    found = json.loads(said)
    assert len(said.splitlines()) == 1
    assert found["considered"] >= len(found["plans"]) > 10
    best, second = found["plans"][:2]
    parts = "arguments", "temporaries", "outputs", "code"
    assert best["fits"]
    assert best["bytes_per_device"] == sum(best["compiled"][name] for name in parts)
    assert second["compiled"] is None
    assert best["seconds"] <= second["seconds"]
    assert cli.main(ask) == 0  # kept: nothing is compiled
    again = capsys.readouterr()
    assert again.out.startswith("take ")
    assert "compiling" not in again.err
    assert again.out.splitlines()[-1].startswith("ladder-jax train tiny model.num_layers=1 ")


@pytest.mark.parametrize(
    "said, change",
    {
        "--tokens 1000 are not a multiple of --sequence 512": dict(tokens=1000, sequence=512),
        "--tokens must be below 2**31, not ": dict(tokens=2**31),
        "give model.ranks": dict(residual="ladder-fresh"),
        "--capacity 1.25 is of experts, which llama-3-70b has not": dict(capacity=1.25),
        "interleave=2 is for a residual that": dict(
            interleave=Interleave.HALVES, residual="no-communication"
        ),
        "splits tiny and 1 sequences of 512 (--interleave 2: over several tensor ranks": dict(
            model="tiny", target="cpu:1", tokens=512, sequence=512, interleave=Interleave.HALVES
        ),
        "no mesh of cpu:7's 7 devices splits tiny and 4 sequences": dict(
            model="tiny", target="cpu:7", tokens=2048, sequence=512
        ),
    }.items(),
)
def test_mistakes(change, said):
    with refused(re.escape(said)):
        candidates(**LARGE | change)


def test_running_out_of_memory_names_the_planner():
    definition = cases.define("ladder", data=2, tensor=4)
    config = load("tiny", overrides=["train.remat=none", "mesh.data=2", "mesh.tensor=4"])
    mesh = definition.layout.mesh
    error = jax.errors.JaxRuntimeError
    asked = "ladder-jax plan --model MODEL --target TARGET --tokens 2048 --sequence 128"
    said = rf"^not enough memory on cpu .*Out of memory allocating 9 bytes\).*{asked}$"
    with refused(said), _memory_explained(config, mesh):  # in one line
        raise error("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    with pytest.raises(error, match="INTERNAL: a bug"), _memory_explained(config, mesh):
        raise error("INTERNAL: a bug")


@pytest.mark.audit
def test_the_recipe_fits_its_target():
    """80 layers compiled for 64 TPU chips, the optimizer among them."""
    found = plans.answer(request.make(**LARGE), compiled=1)
    best = found.plans[0]
    assert not found.refused
    assert best.candidate.mesh == MeshConfig(1, 16, 4)
    assert best.confirmed.device <= best.candidate.request.target.memory
