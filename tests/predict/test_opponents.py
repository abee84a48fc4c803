"""The opponents: all-reduce algorithms, the programs that may use them, sequence parallelism, other
meshes.
"""

import re
import types
from dataclasses import replace

import pytest

from experiments import study
from ladder_jax.config import Interleave, Launch, Phase, preset
from ladder_jax.hardware import HARDWARE
from ladder_jax.predict import layers, machine, model, result, work
from ladder_jax.predict.machine import Algorithm, Kernel, Kernels, Link, Network
from ladder_jax.predict.model import Pass
from ladder_jax.predict.program import Choice, Form, Program, programs
from ladder_jax.predict.timeline import play_slots
from tests.changed import ROOT
from tests.predict.asked import (
    H100,
    NOTHING,
    V5P,
    answered,
    by_residual,
    of_layers,
    predict,
    prompt,
    run,
)

EIGHT = Link(
    latency=10e-6,
    step=1e-6,
    bandwidth=1e9,
    one_shot=Kernel(3e-6, 2e9),
    two_shot=Kernel(5e-6, 4e9),
    in_network=Kernel(6e-6, 8e9),
    nccl_in_network=Kernel(40e-6, 16e9),
)


def test_each_algorithm_has_its_formula():
    assert EIGHT.times(4e6, ranks=1) == {}
    assert EIGHT.fastest(4e6, ranks=1) == (None, 0.0)
    assert EIGHT.times(4e6, ranks=8) == {
        Algorithm.RING: pytest.approx(10e-6 + 14e-6 + 7e-3),
        Algorithm.ONE_SHOT: pytest.approx(3e-6 + 7 * 4e6 / 2e9),
        Algorithm.TWO_SHOT: pytest.approx(5e-6 + 7e6 / 4e9),
        Algorithm.IN_NETWORK: pytest.approx(6e-6 + 4.5e6 / 8e9),
        Algorithm.NCCL_IN_NETWORK: pytest.approx(40e-6 + 4.5e6 / 16e9),
    }
    fastest = lambda size, among: EIGHT.fastest(size, ranks=8, among=among)[0]
    assert fastest(100, machine.ANY) is Algorithm.ONE_SHOT
    assert fastest(4e6, machine.ANY) is Algorithm.NCCL_IN_NETWORK
    assert (
        fastest(1e3, machine.NCCL)
        is fastest(1e3, machine.FITTED)
        is fastest(4e6, machine.FITTED)
        is Algorithm.RING
    )
    # A reduce-scatter and an all-gather move as much as an all-reduce, with one latency more.
    assert 2 * EIGHT.half(4e6, ranks=8) == pytest.approx(EIGHT.all_reduce(4e6, ranks=8) + 10e-6)


def test_several_nodes_have_a_tree_and_at_most_a_two_shot():
    nodes = replace(EIGHT, network=Network(size=4, step=5e-6, bandwidth=1e8))
    assert nodes.times(4e6, ranks=8).keys() == {Algorithm.TREE}
    assert nodes.times(4e6, ranks=4).keys() == EIGHT.times(4e6, ranks=4).keys()
    times = replace(nodes, network=replace(nodes.network, one_shot=7e-6)).times(4e6, ranks=8)
    inside = EIGHT.two_shot.seconds(2 * 3 / 4 * 4e6)
    assert times[Algorithm.TWO_SHOT] == pytest.approx(inside + 7e-6 + 1e6 / 1e8)


def test_a_ladder_uses_what_its_launch_overlaps():
    def of(name, *, machine=H100, ranks=8, phase=Phase.DECODE, tokens=1, **choice):
        shard, block = prompt(preset("llama-3-8b", residual=name), ranks=ranks, tokens=tokens)
        choice = Choice(**{"interleave": Interleave.WHOLE, **choice})
        return programs(work.Task(shard, machine, block), phase=phase, choice=choice)

    assert of("standard") == (Program(algorithms=machine.ANY),)
    explicit = Program(launch=Launch.EXPLICIT, algorithms=machine.ANY)
    chained = Program(launch=Launch.CHAINED, algorithms=machine.NCCL, window=0.33)
    assert of("ladder") == (explicit, chained)  # the default first
    assert of("ladder", launch=Launch.EXPLICIT) == (explicit,)
    # No kernel that is XLA's: between nodes, and where only others have one.
    others = replace(H100, link=replace(H100.link, kernels=Kernels.OTHERS))
    nccl = replace(explicit, algorithms=machine.NCCL)
    for where in (others, machine.load("a800-pcie")):
        assert of("ladder", machine=where)[0] == nccl, where.name
    assert of("ladder", machine=machine.load("h100-2-nodes"), ranks=16) == (nccl, chained)
    assert {one.launch for one in of("ladder", phase=Phase.TRAIN, tokens=1024)} == {Launch.CHAINED}


WINDOWS = [
    row
    for row in study.load(ROOT / "experiments/overlap/results.json")["rows"]
    if row["phase"] in ("prefill", "decode") and row["loop"] == "unrolled"
]


def test_every_target_has_its_windows():
    assert len(WINDOWS) == 12


@pytest.mark.parametrize("row", WINDOWS, ids=lambda row: f"{row['target']}-{row['phase']}")
def test_windows_are_those_of_compiled_programs(row):
    kind = row["target"].partition(":")[0]
    shard, block = prompt(preset("llama-3-70b", residual="ladder"))
    task = work.Task(shard, machine.load(HARDWARE[kind].machine), block)
    found = programs(task, phase=Phase(row["phase"]), choice=Choice())
    window = {one.launch: one.window for one in found}
    least = round(row["chained"]["window_flops_fraction"]["least"], 2)
    assert window.pop(Launch.CHAINED) == min(least, 1.0)
    assert row["hidden"] == row["chained"]["hidden"] == 7
    if row["launch"] == "chained":
        assert window == {}
    else:
        assert window == {Launch.EXPLICIT: 1.0}
        assert row["window_flops_fraction"]["least"] >= 1


def test_forms_of_many_tokens():
    def found(name, tokens, *, rows=1, **ranks):
        one = preset("llama-3-8b", residual=name, **ranks)
        shard, block = prompt(one, rows=rows, tokens=tokens)
        return programs(work.Task(shard, H100, block), phase=Phase.PREFILL, choice=Choice())

    def forms(name, tokens, *, rows=1, interleave=1):
        return {one.form for one in found(name, tokens, rows=rows) if one.interleave == interleave}

    whole = Form.ALL_REDUCE
    split = Form.SEQUENCE_PARALLEL
    ring = Form.COLLECTIVE_MATMUL
    assert forms("standard", 1024) == {whole, split, ring}
    assert forms("standard", 1023) == {whole}
    assert forms("ladder", 1024) == forms("parallel", 1024) == {whole, split}
    # but a ring's gathers and scatters are hidden already
    for name in ("standard", "ladder", "parallel"):
        assert forms(name, 1024, rows=2, interleave=2) == {whole, split}
        assert forms(name, 1024, interleave=2) == forms(name, 1023, rows=2, interleave=2) == {whole}
    assert not forms("no-communication", 1024, interleave=2)
    assert not forms("standard", 1, interleave=2)
    assert len(found("desync-2", 1024, ranks=8)) == 1


def test_70b_on_nvlink_must_beat_one_shot_all_reduces(capsys):
    """README's table has the ratios (tests/test_docs.py); the answer says over whom, and by which
    launch.
    """
    words = "--model llama-3-70b --hardware h100-nvlink --tensor 8 --residual standard,ladder"
    ladder = by_residual(answered(capsys, words))["ladder"]
    assert (ladder["launch"], ladder["all_reduce"]) == ("explicit", "one-shot")
    out = run(capsys, words)
    assert "speed-up: over Standard (one-shot all-reduce)" in out
    assert "figures of threads, not verified" in out
    assert "have never run" in out


@pytest.mark.parametrize("residual", ["standard", "ladder", "parallel"])
@pytest.mark.parametrize("name", machine.NAMES)
def test_nobody_loses_by_a_choice(name, residual):
    """The fastest program is at least as fast as NCCL's, and that at least as fast as the plain
    one. These two have whole windows: a v5e's are smaller.
    """
    on = machine.load(name)
    config = preset(
        "llama-3-8b", residual=residual, num_layers=4, num_kv_heads=16 if on.devices == 16 else 8
    )
    speed = lambda by: model.speed(config, machine=on, tensor=on.devices, rows=4, by=by).seconds
    nccl = speed(Program(algorithms=machine.NCCL))
    assert speed(Choice()) <= nccl or (name, residual) == ("v5e", "ladder")
    assert nccl <= speed(Program())


def timeline(form, *, on=V5P):
    one = preset("llama-3-8b", residual="standard", num_layers=4)
    return of_layers(one, on=on, program=Program(form), rows=4, tokens=2048)


def test_a_ring_hides_what_its_matmuls_are_long_enough_for():
    plain = timeline(Form.SEQUENCE_PARALLEL)
    ring = timeline(Form.COLLECTIVE_MATMUL)
    assert 0 < ring.exposed < 0.5 * plain.exposed
    assert ring.compute == pytest.approx(plain.compute)
    # The same bytes; a ring has no latency of its own. 8 ranks both ways: 4 rounds a gather and a
    # scatter.
    latency = 8 * 2 * V5P.link.latency
    assert ring.wire == pytest.approx(plain.wire - latency)
    free = timeline(Form.COLLECTIVE_MATMUL, on=replace(V5P, link=NOTHING, launch=0.0))
    assert free.seconds >= free.compute
    assert free.exposed < 0.02 * free.compute


def test_a_ring_step_by_hand():
    """One way, 4 ranks: the first chunk bare, then three beside a message each, which outlasts them
    or does not.
    """
    shard, block = prompt(preset("tiny"), ranks=4)
    assert shard.payload(block) == 256
    for bandwidth, expected in ((32.0, 1 + 3 * 2.5), (256.0, 1 + 3 * 1.0)):
        link = Link(latency=1.0, step=0.5, bandwidth=bandwidth)
        on = replace(H100, link=link, contention=0.0, launch=0.0)
        kernel = work.Kernel("", flops=4 * on.flops * on.flops_share)  # a second a chunk
        slots = layers.ring_product(work.Task(shard, on, block), kernel)
        assert play_slots(slots, contention=0.0).seconds == pytest.approx(expected)


def test_a_prefill_and_its_opponents(capsys):
    words = "--model llama-3-70b --hardware v5p --tensor 8 --phase prefill --batch 1 --prompt-length 4096"
    found = answered(capsys, f"{words} --interleave 1")
    assert (found["phase"], found["tokens"]) == ("prefill", 4096)
    opponents = {one["form"]: one for one in found["opponents"] if one["interleave"] == 1}
    assert opponents.keys() == {"all-reduce", "sequence-parallel", "ring collective matmul"}
    ladder = by_residual(found)["ladder"]
    for key, opponent in (
        ("speedup", found["baseline"]),
        ("speedup_over_nccl", opponents["all-reduce"]),
    ):
        expected = ladder["tokens_per_second"] / opponent["tokens_per_second"]
        assert ladder[key] == pytest.approx(expected)
    assert (ladder["form"], ladder["launch"]) == ("sequence-parallel", "chained")
    out = run(capsys, words)
    assert "Standard's forms, tokens/s: ring collective matmul " in out
    assert "; ring all-reduce, two halves in turn " in out


def test_a_training_step_and_meshes_without_tensor_parallelism():
    asked = dict(hardware="v5p", phase="train", residual="standard,ladder")
    few, many = (predict(**asked, batch=batch) for batch in (4, 32))
    forms = lambda answer: [one.form for one in answer.opponents]
    assert "fsdp" not in forms(few)  # fewer sequences than devices: tensor parallelism is forced
    assert (many.baseline.form, many.baseline.all_reduce) == ("fsdp", None)
    assert (many.advice.residual, many.advice.ladder_helps) == ("standard", False)
    assert re.match(r"no: .* Standard \(fsdp\)", many.advice.reason)
    # llama-3-70b's 16 bytes a parameter are more than a device has; a small model needs no
    # collective at all.
    assert "data-parallel" not in forms(many)
    small = predict(**asked, model="smollm2-135m", tensor=3, batch=3)
    assert small.baseline.form == "data-parallel"
    assert small.rows[1].speedup < 1


def test_no_is_said_plainly(capsys):
    words = "--model llama-3-70b --hardware h100-nvlink --phase prefill --batch 4 --residual standard,ladder"
    reason = "no topology is 3% faster than Standard (ring collective matmul); "
    assert run(capsys, words).startswith(f"no: take standard\nreason    {reason}")


@pytest.mark.parametrize("speedup, said", [(1.029, "standard"), (1.03, "ladder")])
def test_what_a_ladder_must_gain(speedup, said):
    row = types.SimpleNamespace
    rows = [row(residual="standard", speedup=1), row(residual="ladder", speedup=speedup)]
    opponent = Pass(seconds=1.0, wire=0.1, exposed=0.1)
    found = result.advise(rows, opponent, name="Standard (ring all-reduce)", tensor=8)
    assert (found.residual, found.ladder_helps) == (said, said == "ladder")
