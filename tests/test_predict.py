"""The speed model: its limits, its sums made another way, the published tables, and the command as a user meets it."""

import dataclasses
import itertools
import json
import math
import pathlib
import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from experiments.predict import install, markdown, published, tables
from ladder_jax import cli, nn, parallel, residual
from ladder_jax.bench import work as counted
from ladder_jax.config import preset, residual_names
from ladder_jax.errors import UserError
from ladder_jax.predict import advice, compiled, machine, model, request, result, sweep, work
from ladder_jax.predict.implementation import AUTHORS, OURS
from ladder_jax.predict.link import Link, Network, Ring
from ladder_jax.predict.timeline import Work, play
from ladder_jax.schedule import hlo
from ladder_jax.schedule.hardware import HARDWARE

EXPERIMENT = pathlib.Path(published.__file__).parent
H100, OFF = machine.load("h100-nvlink"), machine.load("h100-no-nvlink")
MANY = (*residual_names.NAMES, "ladder-3", "desync-3")
JOINT = ("parallel", "parallel-shared-norm", "parallel-ladder")
NOTHING = Link(latency=0.0, step=0.0, bandwidth=math.inf)


def speed(name, *, on=H100, tensor=8, rows=4, shape="llama-3-8b", layers=6, **more):
    ranks = {"ranks": tensor} if residual_names.parse(name).depends_on_ranks else {}
    config = preset(shape, residual=name, num_layers=layers, **ranks)
    return model.speed(config, machine=on, tensor=tensor, rows=rows, **more)


def seconds(found):
    return found.prefill_seconds + found.decode_seconds


def with_link(**changes):
    return dataclasses.replace(H100, link=dataclasses.replace(H100.link, **changes))


# The limits.


@pytest.mark.parametrize("name", MANY)
def test_a_link_without_time_is_no_communication(name):
    fast = dataclasses.replace(H100, link=NOTHING)
    found = speed(name, on=fast)
    assert found.exposed_seconds == found.wire_seconds == 0
    if name not in JOINT:
        assert seconds(found) == pytest.approx(seconds(speed("no-communication", on=fast)), rel=1e-12)


@pytest.mark.parametrize("name", MANY)
def test_without_compute_everything_is_exposed(name):
    idle = dataclasses.replace(H100, flops=1e60, bandwidth=1e60, launch=0.0)
    found = speed(name, on=idle)
    assert found.exposed_seconds == pytest.approx(found.wire_seconds, rel=1e-9)
    assert seconds(found) == pytest.approx(found.wire_seconds, rel=1e-9) and found.step.hidden == 0


@pytest.mark.parametrize("implementation", [OURS, AUTHORS], ids=lambda one: one.name)
def test_on_one_device(implementation):
    """All are equal but the parallel ones, which start other numbers of kernels."""
    found = {name: speed(name, tensor=1, implementation=implementation) for name in MANY}
    standard = seconds(found["standard"])
    for name, one in found.items():
        assert one.wire_seconds == 0 and one.exposed_seconds == pytest.approx(0, abs=1e-15)
        assert (seconds(one) == standard) == (name not in JOINT)
    # Launches, and what a kernel that is launched more or less moves, which is little.
    started = {name: _kernels(name, implementation) for name in ("standard", *JOINT)}
    for name in JOINT:
        more, step = H100.launch * 6 * (started[name] - started["standard"]), found["standard"].step.seconds
        assert found[name].step.seconds - step == pytest.approx(more, rel=0.02, abs=1e-3 * step)


def _kernels(name, implementation):
    """Of one layer of a decode step."""
    config = preset("llama-3-8b", residual=name, num_layers=1)
    ours = work.Model(config, 1, implementation)
    block = work.decode_step(rows=4, prompt_length=1024, new_tokens=512, implementation=implementation)
    shared = residual.of_model(config).shared_norm
    (layer,) = residual.of_model(config).layers
    return sum(kernel.launches for step in layer for kernel in ours.step(step.sublayers, block, shared_norm=shared))


def uniform(name, *, lengths=(1.0, 1.0), all_reduce, layers=8, contention=0.0):
    """Sublayers of given lengths, all of them busy."""
    plan = itertools.chain.from_iterable(residual.topology(name, num_layers=layers).layers)
    length = lambda step: Work(busy=sum(lengths[i] for i in step.sublayers), idle=0.0)
    return play(plan, work=length, all_reduce=all_reduce, contention=contention)


def test_what_a_delay_hides():
    """One sublayer with delay 1; with delay k up to k of them, so that a short one may borrow from a long one."""
    assert uniform("standard", all_reduce=1.0).exposed == 16
    for delay in (1, 2, 3):
        assert uniform(f"ladder-{delay}", all_reduce=1.0).exposed == 1  # the last has nothing to hide under
    uneven = {delay: uniform(f"ladder-{delay}", lengths=(0.5, 1.5), all_reduce=1.0) for delay in (1, 2)}
    # With delay 1 half of each MLP's all-reduce shows, as attention is too short for it; and the last one wholly.
    assert uneven[1].exposed == 7 * 0.5 + 1 and uneven[2].exposed == 1
    for all_reduce in (1.25, 4.0):  # the link is the bottleneck: no delay helps further
        assert uniform("ladder-3", all_reduce=all_reduce).seconds == 1 + 16 * all_reduce
    assert uniform("parallel-ladder", all_reduce=2.0).exposed == 2 < uniform("ladder", all_reduce=2.0).exposed


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
    assert half.seconds == pytest.approx(1 + 1 + 0.5 * (1 - 1 / 1.25) + 0.5)  # only the busy half slows


# The order of events, against the recurrence and against the program.


@pytest.mark.parametrize(
    ("name", "which"),
    [("standard", None), ("ladder", None), ("ladder-2", None), ("ladder-5", None), ("ladder", "2"), ("ladder", "0,3")]
    + [("ladder-3", "1,2,4"), ("ladder-fresh", "3")],
)
def test_events_follow_the_recurrence(name, which):
    """Sublayer i reads x_{i-1-d_i}: it starts when the one before has ended and that sum is whole."""
    topology = residual.topology(name, num_layers=6, ladder_layers=which)
    rng = random.Random(0)
    for _ in range(20):
        lengths, wire = [rng.uniform(0.2, 2) for _ in topology.delays], rng.choice((0.1, 0.7, 1.3, 3))
        ended, whole, free = [], [], 0.0
        for index, (delay, length) in enumerate(zip(topology.delays, lengths)):
            reads = index - 1 - delay
            # A whole sum means that all before it are.
            start = max(ended[-1] if ended else 0.0, whole[reads] if reads >= 0 else 0.0)
            ended.append(start + length)
            free = max(free, ended[-1]) + wire
            whole.append(free)
        order = iter(lengths)
        steps = itertools.chain.from_iterable(topology.layers)
        found = play(steps, work=lambda step: Work(next(order), 0.0), all_reduce=wire, contention=0.0)
        assert found.seconds == pytest.approx(whole[-1])
        assert [bar.stop for bar in found.bars if not bar.wire] == pytest.approx(ended)


@pytest.mark.parametrize(
    ("name", "which"),
    [(name, None) for name in MANY] + [("ladder", "2"), ("parallel-ladder", "0,2"), ("ladder-2", "1")],
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
    traced = jax.make_jaxpr(jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=out))(jnp.ones((8, 2, 4)))
    found = play(
        itertools.chain.from_iterable(topology.layers),
        work=lambda step: Work(1.0, 0.0),
        all_reduce=0.5,
        contention=0.0,
    )
    assert found.all_reduces == str(traced).count("psum")


# Monotonic.


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("shape", ["smollm2-135m", "llama-3-8b"])
def test_monotonic(name, shape):
    fixed = dict(shape=shape, tensor=3 if shape == "smollm2-135m" else 8)
    grow = lambda values: [seconds(speed(name, on=one, **fixed)) for one in values]
    for times in (
        grow([with_link(latency=value) for value in (0, 1e-6, 1e-5, 3e-5, 1e-4, 1e-3)]),
        grow([with_link(step=value) for value in (0, 1e-7, 1e-6, 1e-5)]),
        grow([with_link(bandwidth=value) for value in (1e13, 1e12, 1e11, 1e10, 1e9)]),
        grow([dataclasses.replace(H100, contention=value) for value in (0, 0.1, 0.5, 2)]),
        grow([dataclasses.replace(H100, launch=value) for value in (0, 1e-6, 1e-5)]),
        grow([dataclasses.replace(H100, bandwidth=value) for value in (8e12, 4e12, 1e12)]),
        grow([dataclasses.replace(H100, flops=value) for value in (2e15, 1e15, 1e14)]),
        [seconds(speed(name, rows=rows, **fixed)) for rows in (1, 2, 4, 16, 64, 256)],
        [seconds(speed(name, prompt_length=length, **fixed)) for length in (1, 16, 512, 4096)],
    ):
        assert times == sorted(times) and times[0] < times[-1] * (1 + 1e-12)
    throughput = [speed(name, rows=rows, **fixed).tokens_per_second for rows in (1, 4, 16, 64)]
    assert throughput == sorted(throughput)


# Units and sums.


def test_seconds_of_kernels():
    one = dataclasses.replace(H100, flops=1e12, flops_share=0.5, bandwidth=1e9, bandwidth_share=0.25, launch=1e-6)
    assert one.seconds(flops=1e12, size=0) == 2
    assert one.seconds(flops=1e12, size=1e9) == 4  # the longer of both
    assert one.seconds(flops=0, size=0, launches=3) == pytest.approx(3e-6)


def test_seconds_of_an_all_reduce():
    link = Link(latency=10e-6, step=1e-6, bandwidth=1e9)
    assert link.all_reduce(4e6, ranks=1) == 0
    assert link.all_reduce(4e6, ranks=2) == pytest.approx(10e-6 + 2e-6 + 4e-3)
    assert link.all_reduce(4e6, ranks=8) == pytest.approx(10e-6 + 14e-6 + 7e-3)
    both = dataclasses.replace(link, ring=Ring.TWO_WAY)
    assert both.all_reduce(4e6, ranks=8) == pytest.approx(10e-6 + 8e-6 + 7e-3)
    nodes = dataclasses.replace(link, network=Network(size=8, step=5e-6, bandwidth=1e8))
    assert nodes.all_reduce(4e6, ranks=8) == link.all_reduce(4e6, ranks=8)
    # Each of 8 exchanges half a megabyte with its peer: there and back, half of it each time.
    assert nodes.all_reduce(4e6, ranks=16) == pytest.approx(link.all_reduce(4e6, ranks=8) + 10e-6 + 5e-3)
    assert nodes.all_reduce(4e6, ranks=32) == pytest.approx(link.all_reduce(4e6, ranks=8) + 20e-6 + 7.5e-3)
    # 12 ranks are two nodes of 6, not one of 8.
    six = link.all_reduce(4e6, ranks=6) + 10e-6 + 4e6 / 6 / 1e8
    assert nodes.all_reduce(4e6, ranks=12) == pytest.approx(six)
    twice = nodes.faster(2)
    assert twice.all_reduce(4e6, ranks=16) == pytest.approx(nodes.all_reduce(4e6, ranks=16) / 2)


@pytest.mark.parametrize(("shape", "tensor"), [("tiny", 1), ("tiny", 4), ("tiny", 8), ("smollm2-135m", 3)])
def test_work_is_what_the_shards_hold(shape, tensor):
    """Bytes and FLOPs from the configuration alone are those that `bench` counts from the arrays' shards."""
    config = preset(shape, residual="standard", num_layers=2)
    definition = nn.define(config, mesh=parallel.make_mesh(tensor=tensor))
    ours, shape = work.Model(config, tensor, OURS), dict(rows=3, prompt_length=8)
    kernels = lambda block: [
        *itertools.chain.from_iterable(ours.step((i % 2,), block, shared_norm=False) for i in range(4)),
        ours.embedding(block),
        *ours.head(block),
    ]
    step = kernels(work.decode_step(**shape, new_tokens=5, implementation=OURS))
    moved = sum(kernel.weights + kernel.cache for kernel in step)
    assert moved == counted.decode_bytes(definition, **shape, new_tokens=5)
    prefill = kernels(work.prefill(**shape, new_tokens=5, implementation=OURS))
    assert sum(kernel.flops for kernel in prefill) == counted.prefill_flops(definition, **shape)
    held = counted.weight_bytes([definition]) + counted.cache_bytes(definition, rows=3, capacity=13)
    assert ours.memory(rows=3, capacity=13) == held


def test_published_figures_stand_once():
    """The machines' peaks are those that the audits compile for."""
    for kind, found in HARDWARE.items():
        one = machine.load(compiled.MACHINES.get(kind, kind))
        for name in ("flops", "bandwidth", "memory"):
            assert getattr(one, name) == pytest.approx(getattr(found, name), rel=0.01), (kind, name)


@pytest.mark.parametrize("name", machine.NAMES)
def test_every_constant_has_a_source(name):
    loaded = machine.load(name)
    asked = request.make(model="llama-3-8b", hardware=name, tensor=8 if loaded.devices >= 8 else 1)
    for constant, found in result.constants(asked).items():
        assert len(found["source"]) > 5 and found["source"] != "given without a source", constant
    kinds = (
        "fitted: python -m experiments.predict",
        "assumed",
        "http",
        "NVIDIA",
        "one ",
        "two ",
        "80 GB",
        "141 GB",
        "GPUs",
    )
    others = ("NDR", "the largest")
    assert all(source.startswith((*kinds, *others)) for source in loaded.sources.values()), loaded.sources


# The published tables.


@pytest.fixture(scope="module")
def kept():
    return json.loads((EXPERIMENT / "results.json").read_text())


@pytest.fixture(scope="module")
def made():
    return tables.predictions(published.shipped())


def test_the_tables_are_what_the_package_predicts(kept, made):
    assert set(kept) == {"fit", *made}
    for name, rows in made.items():
        assert _close(kept[name], rows), name


def test_the_readme_holds_them(kept):
    text = (EXPERIMENT / "README.md").read_text()
    assert markdown.fill(text, kept) == text and text.count("\n| ") > 60
    with pytest.raises(ValueError, match="0 places for the table 'constants'"):
        markdown.fill("", kept)


def test_the_package_has_the_fitted_constants(kept):
    constants, machines = kept["fit"]["constants"], published.shipped()
    nvlink, off, nodes = machines["nvlink"], machines["off"], machines["two nodes"]
    shipped = {
        **{name: getattr(nvlink, name) for name in ("flops_share", "bandwidth_share", "launch", "contention")},
        "cache_speed": AUTHORS.cache_speed,
        "latency": nvlink.link.latency,
        "nvlink bandwidth": nvlink.link.bandwidth,
        "off step": off.link.step,
        "off bandwidth": off.link.bandwidth,
        "network step": nodes.link.network.step,
    }
    assert shipped == {name: install.rounded(value) for name, value in constants.items()}
    assert len(constants) - 1 == 9  # the network's is not among those of the 56 figures
    assert off.link.latency == nvlink.link.latency
    assert machine.load("b200-nvlink").link.bandwidth == 2 * nvlink.link.bandwidth


def test_how_near_they_come(made):
    found = made["published_summary"]
    assert found["figures"] == 56
    assert found["median_error"] < 0.04 and found["worst_error"] < 0.15
    assert found["median_ratio_error"] < 0.05 and found["pairs_out_of_order"] == 0
    for one in made["elsewhere_summary"].values():  # what was not fitted to
        assert one["median_error"] < 0.06 and one["worst_error"] < 0.15


def test_errors_are_computed_rightly():
    from experiments.predict import evaluate

    setting = lambda name: published.Setting("m", "off", 2, 1, name)
    measured = {setting("standard"): 10.0, setting("ladder"): 12.0, setting("parallel"): 11.0}
    predicted = {setting("standard"): 11.0, setting("ladder"): 11.0, setting("parallel"): 12.0}
    found = evaluate.errors(measured, predicted.__getitem__)
    assert found.each[setting("ladder")] == pytest.approx(-1 / 12)
    assert found.ratios[setting("ladder")] == pytest.approx(1.0 - 1.2)
    assert {pair[0].residual for pair in found.wrong} == {"ladder"} and len(found.wrong) == 2


def _close(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_close(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_close, first, second))
    return first == pytest.approx(second, rel=1e-9) if isinstance(first, float) else first == second


# Compiled schedules.


def test_from_a_schedule():
    read = lambda name: hlo.parse((pathlib.Path(__file__).parent / "hlo" / f"{name}.hlo").read_text())
    at = dict(kind="h100", ranks=8)
    ladder, standard = (compiled.play(read(name), machine=H100, **at) for name in ("h100-unrolled", "h100-standard"))
    assert 0 < ladder.exposed < standard.exposed and ladder.hidden > 0.3 > 0.05 > standard.hidden
    none = compiled.play(read("h100-unrolled"), machine=dataclasses.replace(H100, link=NOTHING), **at)
    assert none.exposed == none.wire == 0 and none.seconds == pytest.approx(ladder.seconds - ladder.exposed)
    slow = compiled.play(read("h100-unrolled"), machine=OFF, **at)
    assert slow.exposed > ladder.exposed
    eager = compiled.play(read("h100-unrolled"), machine=dataclasses.replace(H100, launch=0.0), **at)
    assert eager.seconds < ladder.seconds


# The advice.


def advise(**words):
    return result.predict(request.make(**{"model": "llama-3-70b", **words})).advice


def test_advice():
    found = advise(hardware="h100-nvlink", tensor=8)
    assert found.residual == "ladder" and found.ladder_helps and "fits under" in found.reason
    found = advise(hardware="h100-no-nvlink", tensor=8)
    assert found.residual == "parallel-ladder" and "outlasts its shorter sublayer" in found.reason
    assert found.ladder_helps and "where the plain Ladder gives 1." in found.reason
    found = advise(hardware="h100-nvlink", tensor=1, model="llama-3-8b")
    assert found.residual == "standard" and found.ladder_helps is False and "one device" in found.reason
    found = advise(hardware="h100-no-nvlink", tensor=8, residual="standard,desync-2")
    assert found.residual == "desync-2" and found.ladder_helps is None
    assert set(advice.PREFERENCE) - {"ladder-K"} < set(residual_names.NAMES)


def test_hybrids_lie_between():
    whole = request.make(model="llama-3-8b", hardware="h100-nvlink", residual="standard,ladder")
    half = dataclasses.replace(whole, ladder_layers="16")
    times = [[seconds(row.speed) for row in result.predict(one).rows] for one in (whole, half)]
    assert times[0][0] == times[1][0] > times[1][1] > times[0][1]
    middle = (times[0][0] + times[0][1]) / 2
    assert times[1][1] == pytest.approx(middle, rel=0.02)


# The command.


def run(capsys, *words):
    status = cli.main(["predict", *map(str, words)])
    return status, *capsys.readouterr()


def test_json(run_cli):
    done = run_cli("predict", "--model", "llama-3-70b", "--hardware", "v5p", "--tensor", 8, "--json", check_status=0)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""
    found = json.loads(done.stdout)
    assert (found["model"], found["hardware"], found["tensor"], found["batch"]) == ("llama-3-70b", "v5p", 8, 1)
    assert (found["prompt_length"], found["new_tokens"]) == (1024, 512)
    rows = {row["residual"]: row for row in found["rows"]}
    assert tuple(rows) == residual_names.NAMES
    for row in rows.values():
        total = row["prefill_seconds"] + row["decode_seconds"]
        assert row["tokens_per_second"] == pytest.approx(512 / total)
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows["standard"]["tokens_per_second"])
        assert 0 <= row["exposed_seconds"] < total and row["fits"]
        assert row["decode_seconds"] == pytest.approx(511 * row["step_seconds"])
    assert found["recommendation"]["residual"] == "ladder"
    assert found["constants"]["link.step"]["source"].startswith("https://jax-ml.github.io")


def test_text_and_plot(capsys, tmp_path):
    picture = tmp_path / "a.png"
    words = ("--model", "llama-3.1-405b", "--hardware", "h100-nvlink", "--tensor", 8, "--batch", 4, "--plot", picture)
    status, out, err = run(capsys, *words, "--residual", "standard,ladder-7,no-communication")
    assert (status, err) == (0, "") and picture.read_bytes().startswith(b"\x89PNG")
    said = out.splitlines()
    assert said[0].startswith("take ladder-7: communication is ") and "tensor 8, batch 4 on h100-nvlink" in said[1]
    assert [line.split()[0] for line in said if "%" in line][1:3] == ["standard", "ladder-7"]
    assert any(line.startswith("note") and "more than a device's 79 GiB" in line for line in said)


def test_sweep(capsys, tmp_path):
    picture = tmp_path / "a.svg"
    words = ("--model", "llama-3-8b", "--hardware", "h100-nvlink", "--layers", 4, "--plot", picture)
    axes = ("--sweep", "tensor=1,3,8", "batch=1,16", "link=0.25,1")
    status, out, err = run(capsys, *words, *axes, "--json")
    assert status == 0 and picture.read_text().lstrip().startswith("<?xml")
    points = json.loads(out)["sweep"]
    assert [(p["tensor"], p["batch"], p["link"]) for p in points][:3] == [(1, 1, 0.25), (1, 1, 1.0), (1, 16, 0.25)]
    assert {p["tensor"] for p in points} == {1, 8}
    slow, own = (p["rows"][0]["step_seconds"] for p in points[4:6])
    assert slow > own
    status, out, _ = run(capsys, *words, *axes)
    assert "no help, 1.00" in out and "cannot be split over 3 devices: left out" in out
    large = ("--model", "llama-3.1-405b", "--hardware", "h100-nvlink", "--sweep", "batch=1,4")
    status, out, _ = run(capsys, *large)
    assert status == 0 and "ladder *" in out and "need more memory" in out
    status, _, err = run(capsys, *large, "--plot", picture)
    assert status == 2 and "there is nothing to draw, as no topology that communicates fits into memory" in err


def test_nothing_beats_the_front():
    asked = request.make(model="llama-3-8b", hardware="h100-nvlink", layers=4)
    points = sweep.run(asked, request.sweep(asked, ["tensor=1,2,8", "batch=1,16", "link=0.5,1"]))
    front = sweep.front(points)
    key = lambda point, row: (sweep.latency(row), sweep.throughput(point, row))
    for point in points:
        for row in point.result.rows:
            if point.link == 1 and row.residual != "no-communication":
                slower, less = key(point, row)
                assert any(a <= slower and b >= less for a, b in (key(*one) for one in front))
    for first, second in itertools.pairwise(front):
        assert key(*first)[0] < key(*second)[0] and key(*first)[1] < key(*second)[1]


YAML = """
devices: 4
memory: 80e9
flops: 1e15
bandwidth: {value: 3e12, source: a data sheet}
flops_share: 0.5
bandwidth_share: 0.9
launch: 0
contention: 0.1
link: {latency: 1e-5, step: 0, bandwidth: 100e9}
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("memory: 80e9", ""), "lacks the constant memory (needed: devices, memory, flops,"),
        (("latency: 1e-5, ", ""), "lacks the constant link.latency"),
        (("3e12", "-3e12"), "bandwidth of hardware"),
        (("3e12", "-3e12"), "must be positive, not -3e12"),
        (("80e9", "0"), "memory of hardware"),
        (("latency: 1e-5", "latency: -1e-5"), "link.latency of hardware"),
        (("latency: 1e-5", "latency: -1e-5"), "must not be negative, not -1e-5"),
        (("1e15", "fast"), "must be a number, not 'fast'"),
        (("1e15", ".nan"), "must be a number, not nan"),
        (("1e15", "true"), "must be a number, not True"),
        (("flops_share: 0.5", "flops_share: 50"), "is a share of the published rate, at most 1, not 50"),
        (("devices: 4", "devices: 4.5"), "must be a whole number, not 4.5"),
        (("launch: 0", "lunch: 0"), "unknown constant of hardware"),
        (("launch: 0", "lunch: 0"), "did you mean 'launch'?"),
        (("source: a", "sauce: a"), "unknown key in bandwidth of hardware"),
        (("step: 0", "step: 0, ring: three-way"), "unknown value for link.ring of hardware"),
        (("link: {", "link: {network: {size: 8}, "), "lacks the constant link.network.step"),
        (("link: {latency: 1e-5, step: 0, bandwidth: 100e9}", "link: null"), "has 4 devices but no link"),
        ((YAML, "[1, 2"), "is not YAML"),
        ((YAML, "a machine"), "must hold constants such as"),
        ((YAML, "based_on: h100-nvlnk"), "did you mean 'h100-nvlink'?"),
    ],
)
def test_a_wrong_file_is_one_line(change, said, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(YAML.replace(*change))
    status, out, err = run(capsys, "--model", "tiny", "--hardware", file)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and said in err


def test_files_of_the_users_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(YAML)
    found = machine.load(str(file))
    assert (found.name, found.devices, found.flops, found.link.bandwidth) == ("mine", 4, 1e15, 100e9)
    assert found.sources == {"bandwidth": "a data sheet"} and found.link.network is None
    file.write_text("based_on: h100-2-nodes\nlink:\n  network: {step: {value: 9e-6, source: measured}}\nlaunch: 1e-6\n")
    found, base = machine.load(str(file)), machine.load("h100-2-nodes")
    assert found.link.network == dataclasses.replace(base.link.network, step=9e-6)
    assert found.launch == 1e-6 and found.flops_share == base.flops_share and "launch" not in found.sources
    assert found.sources["link.network.step"] == "measured"
    file.write_text(YAML.replace("devices: 4", "devices: 1").replace(YAML.splitlines()[-1], "link: null"))
    alone = machine.load(str(file))
    assert alone.link is None and alone.all_reduce(1e9, ranks=1) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--hardware h200-nvlnk",
            "unknown hardware (not a .yaml file either) 'h200-nvlnk'; did you mean 'h200-nvlink'?",
        ),
        ("", "--hardware is needed (allowed: h100-nvlink, "),
        ("--hardware nowhere.yaml", "cannot read hardware 'nowhere.yaml': No such file"),
        (
            "--hardware v5e --tensor 5",
            "--tensor 5: model.num_heads=64 is not divisible by mesh.tensor=5; did you mean 4?",
        ),
        ("--hardware h100-nvlink --tensor 16", "--tensor 16 is more than the 8 devices of h100-nvlink (allowed for"),
        ("--hardware v5e --batch 0", "--batch must be positive, not 0"),
        ("--hardware v5e --new-tokens 1", "--new-tokens must be at least 2"),
        ("--hardware v5e --residual laddr", "unknown residual 'laddr'; did you mean 'ladder'?"),
        ("--hardware v5e --residual ladder,ladder", "names ladder twice"),
        ("--hardware v5e --ladder-layers 99", "is not a number of layers"),
        ("--hardware v5e --residual standard --ladder-layers 2", "--ladder-layers needs a ladder kind"),
        ("--hardware v5e --implementation theirs", "unknown implementation 'theirs'"),
        ("--hardware v5e --plot a.txt", "--plot a.txt: the file must end in"),
        ("--hardware v5e --sweep tensr=1", "unknown axis of --sweep 'tensr'; did you mean 'tensor'?"),
        ("--hardware v5e --sweep batch", "has no values: write it as in batch=1,2,4"),
        ("--hardware v5e --sweep link=0,1", "--sweep link must be factors above 0"),
        ("--hardware v5e --sweep batch=x", "must be numbers as in 1,4,16, not 'x'"),
        ("--hardware v5e --sweep tensor=3", "--tensor 3: model.num_heads=64"),
        ("--hardware v5e --sweep tensor=8,64", "--tensor 64 is more than the 16 devices of v5e"),
        ("--from-schedule cpu:8", "cpu hides nothing"),
        ("--from-schedule v9:2", "unknown target 'v9:2'"),
        ("--from-schedule v5e:2x4 --sweep batch=1", "--sweep is analytic"),
        ("--from-schedule v5e:2x4 --implementation authors", "--implementation must be ours"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, "--model", "llama-3-70b", *words.split())
    assert (status, out) == (2, "") and len(err.splitlines()) == 1 and said in err, err
    assert not list(tmp_path.iterdir())


def test_an_unknown_model_is_named():
    with pytest.raises(UserError, match="did you mean 'llama-3-70b'"):
        request.make(model="llama-3-7b", hardware="v5e")
