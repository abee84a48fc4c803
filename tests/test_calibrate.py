"""`ladder-jax calibrate` on simulated devices: what it writes, `predict` reads. No time is
judged.
"""

import contextlib
import io
import json
import os
import types

import jax
import pytest
import yaml

from ladder_jax import cli, parallel
from ladder_jax.parallel import Overlap
from ladder_jax.predict import calibrate, machine, measure
from ladder_jax.predict.machine import Kernel, Link, Ring
from ladder_jax.predict.measure import Reduced
from tests.refusals import refused


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The JSON of one run on four simulated devices, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("calibrate")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        patch.setattr(measure, "REPEATS", 3)
        assert cli.main("calibrate --tensor 4 --out mine.yaml --json".split()) == 0
    assert len(out.getvalue().splitlines()) == 1
    return json.loads(out.getvalue()), folder


def test_predict_reads_what_was_written(written, prints):
    found, folder = written
    assert os.listdir(folder) == ["mine.yaml"]
    mine = machine.load(str(folder / "mine.yaml"))
    assert (mine.name, mine.devices) == ("mine", 4)
    constants = {name: one["value"] for name, one in mine.constants().items()}
    assert found["constants"] == {name: constants[name] for name in mine.sources}
    words = f"predict --model tiny --hardware {folder / 'mine.yaml'} --tensor 2"
    rows = json.loads(prints(*words.split(), "--json"))["rows"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert prints(*words.split()).endswith("calibrate measures yours, but for contention\n")


def test_what_it_says_of_itself(written):
    found, folder = written
    text = (folder / "mine.yaml").read_text()
    first, second = text.splitlines()[:2]
    assert f"with jax {jax.__version__}" in first
    assert "Simulated devices" in second
    tree = yaml.safe_load(text)
    assert "best of 3 runs" in tree["bandwidth"]["source"]
    assert tree["contention"]["source"] == "assumed as on h100-nvlink"
    assert "6 all-reduces over up to 4 devices" in tree["link"]["step"]["source"]


def test_the_chain_reduces_as_often_as_it_says():
    """No compiler may see that a sum of sums needs no communication."""
    run = measure._chain_of_all_reduces(
        parallel.make_mesh(tensor=4, devices=jax.devices()[:4]), 4096
    )
    chain, placed = (cell.cell_contents for cell in run.__closure__)
    text = chain.lower(*placed).compile().as_text()
    assert (
        sum(" all-reduce(" in line or "all-reduce-start(" in line for line in text.splitlines())
        == measure.CHAIN
    )
    assert run().shape == (4, 2048)


def samples(seconds, *, ranks=(2, 4, 8), sizes=(4096, 2**20, 2**24), **_):
    """seconds: of a size and the number of ranks."""
    return [Reduced(n, size, seconds(size, ranks=n), 0.0) for n in ranks for size in sizes]


@pytest.mark.parametrize("ring", Ring)
def test_the_fit_finds_a_links_constants(ring):
    true = Link(latency=12e-6, step=0.8e-6, bandwidth=250e9, ring=ring)
    measured = samples(true.all_reduce)
    found = measure.fit_link(measured, ring=ring)
    for name in ("latency", "step", "bandwidth"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert measure.fit_error(measured, found) < 1e-9
    # one size of ring: steps are part of the latency
    two = measure.fit_link(samples(true.all_reduce, ranks=(4,)), ring=ring)
    assert two.step == 0
    assert two.all_reduce(4096, ranks=4) == pytest.approx(true.all_reduce(4096, ranks=4))


@pytest.fixture
def ceilings(monkeypatch):
    """Sets what a copy and a matmul are measured to reach."""

    def reach(*samples):
        found = measure.Ceiling(samples, "an array")
        monkeypatch.setattr(measure, "copy_bandwidth", lambda *_, **__: found)
        monkeypatch.setattr(measure, "matmul_peak", lambda *_, **__: found)

    return reach


def test_a_gpus_own_kernels_are_measured_apart_from_nccl(ceilings, monkeypatch, tmp_path):
    """As on sixteen GPUs, with made-up times: NCCL's with the options that hide, a kernel's with
    those that wait.
    """
    nccl = Link(latency=12e-6, step=0.8e-6, bandwidth=250e9)
    kernel = Kernel(latency=8e-6, bandwidth=200e9)
    ceilings(90e9, 100e9)
    monkeypatch.setattr(measure, "launch", lambda: 3e-6)
    monkeypatch.setattr(measure.memory, "free_memory", lambda *_, **__: 80e9)
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])

    of_kernel = lambda size, ranks: kernel.seconds((ranks - 1) * size)
    times = {Overlap.HIDES: nccl.all_reduce, Overlap.WAITS: of_kernel}
    all_reduces = lambda *, overlap, **shape: samples(times[overlap], **shape)
    monkeypatch.setattr(measure, "all_reduces", all_reduces)
    sections, timed = measure.constants(16)
    assert len(timed) == 4 * len(measure.SIZES)
    assert "fitted to 9 all-reduces" in sections["link"]["one_shot"]["latency"]["source"]
    (tmp_path / "mine.yaml").write_text(calibrate.as_yaml(sections, gpu))
    mine = machine.load(str(tmp_path / "mine.yaml"))
    assert mine.link.latency == pytest.approx(12e-6, rel=1e-3)
    assert mine.link.two_shot is None
    assert mine.link.one_shot.latency == pytest.approx(8e-6, rel=1e-3)
    assert mine.link.one_shot.bandwidth == pytest.approx(200e9, rel=1e-3)
    assert "XLA's kernel" in mine.sources["link.one_shot.latency"]


def test_nonsense_is_refused():
    same = [Reduced(2, size, 1e-3, 0.0) for size in (4096, 2**20)]
    with refused("do not take longer with more bytes \\(4 KiB: 1000 µs, 1024 KiB: 1000 µs\\)"):
        measure.fit_link(same, ring=Ring.ONE_WAY)
    with refused("do not take longer"):
        measure.fit_one_shot(same)


def test_nothing_is_written_that_was_not_measured(ceilings, mistake):
    ceilings(0.0)
    said = mistake(*"calibrate --out mine.yaml --tensor 1".split())
    assert "ladder-jax: measured here: flops must be positive, not 0.0" in said


def test_one_device(ceilings, monkeypatch, tmp_path, prints):
    ceilings(90e9, 100e9)
    monkeypatch.chdir(tmp_path)
    said = prints(*"calibrate --out one.yml --tensor 1".split())
    assert "one.yml: 8 constants" in said
    assert "1e+11" in said
    assert "all-reduce" not in said
    one = machine.load("one.yml")
    assert (one.link, one.devices, one.bandwidth) == (None, 1, 100e9)
    assert "the best of 10 runs, an array" in one.sources["flops"]


def test_timings(monkeypatch):
    calls = []
    assert len(measure.timed(lambda: calls.append(1), of=4)) == measure.REPEATS
    assert len(calls) == measure.WARMUP + measure.REPEATS
    monkeypatch.setattr(measure, "timed", lambda run, *, of: (1.0, 2.0, 3.0, 4.0, 100.0))
    assert measure.all_reduces(ranks=[2], sizes=[8]) == [
        Reduced(2, 8, 3, pytest.approx((4 - 2) / 3))
    ]


@pytest.mark.parametrize(
    "words, said",
    {
        "": "the following arguments are required: --out",
        "--out mine.txt": "--out mine.txt: the file must end in .yaml or .yml",
        "--out nowhere/mine.yaml": "there is no folder nowhere",
        "--out mine.yaml --repeats 3": "unknown option '--repeats'",
        "--out mine.yaml --tensor 99": "--tensor 99 is more than this machine's 8 devices",
    }.items(),
)
def test_mistakes_are_one_line(words, said, mistake):
    assert said in mistake("calibrate", *words.split())
