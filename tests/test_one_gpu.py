"""experiments/one_gpu on a CPU, where its times mean nothing: that the emulated wire changes no
value and is really there, and the arithmetic.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import study
from experiments.one_gpu import __main__ as command, wire
from experiments.one_gpu.wire import host_wire
from ladder_jax import config, decode, nn, parallel
from ladder_jax.bench import measure, request as requests
from ladder_jax.bench.measure import Samples
from ladder_jax.bench.request import Variant
from ladder_jax.config import Loop
from ladder_jax.decode import steps
from ladder_jax.predict import machine, model as speeds
from ladder_jax.predict.program import Choice
from tests import covering
from tests.changed import ROOT


def program(name):
    """The token loop of one of four ranks, and its arguments."""
    request = requests.make(model="tiny", residual=name, share=4, layers=1)
    definition = nn.define(request.config(name), mesh=parallel.make_mesh())
    [params] = measure.random_weights([definition])
    caches = steps.make_cache(definition, rows=2, capacity=16, loop=Loop.UNROLLED)()
    tokens = jnp.array([3, 5], jnp.int32)
    nothing = jnp.zeros(2, jnp.int32)
    seen = decode.seen_in(definition)(tokens[:, None], nothing)
    settings = decode.Settings.of(jax.random.split(jax.random.key(0), 2))
    loop = decode.decode_many(definition, count=4, choice=decode.Choice.GREEDY)
    return loop, (params, caches, seen, tokens, nothing, settings)


@pytest.mark.parametrize(
    "name", covering.marked([("standard",), ("ladder-2",)], chosen=[("parallel",)])
)
def test_the_wire_brings_back_what_it_was_given(name):
    moved = lambda loop, args: str(jax.make_jaxpr(loop.__wrapped__)(*args)).count("device_put[")
    loop, args = program(name)
    assert moved(loop, args) == 0
    expected = np.asarray(loop(*args)[0])
    with host_wire():
        loop, args = program(name)
        assert moved(loop, args) == 2 * (1 if name == "parallel" else 2)  # there and back
        assert np.array_equal(loop(*args)[0], expected)
    assert moved(*program(name)) == 0  # and nothing of it is left


def test_it_needs_what_the_library_needs(run_python):
    """On a card's machine, where the tests' own packages may be missing."""
    parts = "values", "experts", "wire"
    script = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(['pytest', 'autograd', 'hypothesis']))\n"
        f"for part in {parts}: importlib.import_module(f'experiments.one_gpu.{{part}}')\n"
    )
    run_python("-c", script, cwd=ROOT, check_status=0)


def test_exposed():
    request = requests.make(
        model="tiny", residual="standard,ladder", share=4, layers=3, new_tokens=11
    )
    sample = lambda prefill, decode: Samples(
        Variant("standard", 1), 1, (prefill, 9.0, 0.0), (decode, 9.0, 0.0), 0.0, 0
    )
    standard = wire.row(request, sample(1.0, 2.0), sample(1.7, 5.0), sample(1.2, 2.2))
    close = lambda value: pytest.approx(value, rel=1e-9)
    assert standard["all_reduces"] == 6
    assert standard["prefill_exposed_seconds"] == close(0.6 / 6)
    assert standard["decode_exposed_seconds"] == close(2.9 / 60)
    assert standard["decode_drift_seconds"] == close(0.2 / 60)


def test_the_command(tmp_path, monkeypatch):
    """Measured with the wire alone: without it, test_bench.py does."""
    measured = measure.samples
    nothing = lambda request, mesh: [
        Samples(variant, 1, (1.0,), (1.0,), 0.0, 0) for variant in request.variants
    ]
    each = iter((nothing, measured, nothing))
    monkeypatch.setattr(measure, "samples", lambda *args, **settings: next(each)(*args, **settings))
    out = tmp_path / "wire.json"
    _, *words = command.WIRE.format(**command.SMALL).split()
    assert wire.main([*words, "--out", str(out)]) == 0
    found = study.load(out)["rows"]
    assert [row["residual"] for row in found] == ["standard", "ladder", "parallel"]


def test_a_run_goes_on_where_it_stood(monkeypatch, tmp_path, capsys):
    """Of parts that are there with the same settings, others are measured; what fails is named."""
    out = tmp_path / "results.json"

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["one_gpu", "--small", *words, "--out", str(out)])
        return command.main(), capsys.readouterr().err

    monkeypatch.setitem(command.PARTS, "share", "no.such.module")
    status, said = run("--parts", "halves", "share")
    assert status == 1
    assert said.endswith("not measured, for the reasons above: share\n")
    kept = out.read_text()
    probe = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[-1], 'w'))"
    (tmp_path / "probe.py").write_text(probe)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(command.PARTS, "wire-no-graphs", "probe {numbers}")
    status, said = run("--parts", "halves", "wire-no-graphs")
    assert status == 0
    assert f"halves: stands in {out}" in said
    found = json.loads(out.read_text())
    assert found["halves"] == json.loads(kept)["halves"]
    assert [row["interleave"] for row in found["halves"]["rows"]] == [1, 2]
    other = found["wire-no-graphs"]
    assert (
        other["command"]
        == f"XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m probe {command.TINY}"
    )
    assert other["XLA_FLAGS"].endswith("--xla_gpu_enable_command_buffer=")


def test_the_page_says_what_was_measured():
    page = (command.HERE / "README.md").read_text()
    prose = " ".join(page.split())
    found = study.load(command.HERE / "results.json")
    assert study.fill(page, command.tables(found)) == page
    errors = [row["error"] / row["error_of_cpu"] for row in found["values"]["rows"]]
    assert f"err by {min(errors):.2f} to {max(errors):.2f} times" in page
    for batch in (4, 16):
        whole, halves = (
            row["prefill_seconds_each"] for row in found["halves"]["rows"] if row["batch"] == batch
        )
        ratios = sorted(half / one for one, half in zip(whole, halves))
        middle = ratios[len(ratios) // 2]
        least = ratios[0]
        most = ratios[-1]
        assert f"{middle:.2f} ({least:.2f} to {most:.2f})" in prose
    [copied] = (c for c in found["ceilings"]["copies"] if (c["gib"], c["form"]) == (1, "~x uint32"))
    assert f"reach {copied['best'] / 1e9:,.0f} " in prose


def test_the_speed_model_beside_the_card():
    """A rank's share without communication: the page of experiments/predict says how far it is
    off.
    """
    page = " ".join((command.HERE.parent / "predict/README.md").read_text().split())
    rows = study.load(command.HERE / "results.json")["wire"]["rows"]
    model = config.preset("llama-3-70b", num_layers=8, residual="no-communication")
    on = dict(machine=machine.load("h200-nvlink"), tensor=8, new_tokens=64, by=Choice())
    standard = {row["batch"]: row for row in rows if row["residual"] == "standard"}
    computed = lambda one: one.seconds - one.exposed
    prefill = []
    decode = []
    for batch in (1, 16):
        predicted = speeds.speed(model, rows=batch, **on)
        measured = standard[batch]
        prefill.append(computed(predicted.prefill) / measured["prefill_seconds"])
        decode.append(computed(predicted.step) * 63 / measured["decode_seconds"])
    said = lambda ratios: " and ".join(f"{ratio:.2f}" for ratio in ratios)
    assert f"predicted at {said(decode)} (batch 1, 16)" in page
    assert f"prefills at {said(prefill)}, " in page
