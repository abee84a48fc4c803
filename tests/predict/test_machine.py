"""Hardware: published figures and a user's own file; units, sums, and compiled schedules played on
it.
"""

import re
from dataclasses import replace

import pytest

from ladder_jax import hardware, nn, parallel
from ladder_jax.config import Loop, preset
from ladder_jax.decode import memory, weights
from ladder_jax.hardware import HARDWARE
from ladder_jax.predict import machine, work
from ladder_jax.predict.machine import Link, Network, Ring
from tests.predict.asked import H100


def test_seconds_of_kernels():
    one = replace(H100, flops=1e12, flops_share=0.5, bandwidth=1e9, bandwidth_share=0.25)
    assert one.seconds(flops=1e12, size=0) == 2
    assert one.seconds(flops=1e12, size=1e9) == 4  # the longer of both


def test_seconds_of_an_all_reduce():
    """One-way rings are in test_opponents.py."""
    link = Link(latency=10e-6, step=1e-6, bandwidth=1e9)
    both = replace(link, ring=Ring.TWO_WAY)
    assert both.all_reduce(4e6, ranks=8) == pytest.approx(10e-6 + 8e-6 + 7e-3)
    nodes = replace(link, network=Network(size=8, step=5e-6, bandwidth=1e8))
    inside = link.all_reduce(4e6, ranks=8)
    assert nodes.all_reduce(4e6, ranks=8) == inside
    # Each of 8 exchanges half a megabyte with its peer: there and back, half of it each time.
    assert nodes.all_reduce(4e6, ranks=16) == pytest.approx(inside + 10e-6 + 5e-3)
    assert nodes.all_reduce(4e6, ranks=32) == pytest.approx(inside + 20e-6 + 7.5e-3)
    # 12 ranks are two nodes of 6, not one of 8.
    six = link.all_reduce(4e6, ranks=6) + 10e-6 + 4e6 / 6 / 1e8
    assert nodes.all_reduce(4e6, ranks=12) == pytest.approx(six)


@pytest.mark.parametrize(
    "tensor, config",
    {
        8: preset("tiny", num_layers=2),
        3: preset("smollm2-135m", num_layers=2),
        4: preset("tiny-moe", num_layers=3, d_ff=256, moe=dict(dense_layers=1)),
    }.items(),
    ids=["dense", "tied", "experts"],
)
def test_memory_is_what_the_shards_hold(config, tensor):
    config = replace(config, residual="standard")
    definition = nn.define(config, mesh=parallel.make_mesh(tensor=tensor))
    held = weights.shard_bytes(weights.abstract(definition, loop=Loop.UNROLLED))
    held += memory.cache_bytes(definition, rows=3, capacity=13)
    assert work.Model(config, tensor).memory(rows=3, capacity=13) == held


def test_published_figures_stand_once():
    """The machines' peaks are those that the audits compile for."""
    for kind, found in HARDWARE.items():
        one = machine.load(found.machine)
        for name in ("flops", "bandwidth", "memory"):
            assert getattr(one, name) == pytest.approx(getattr(found, name), rel=0.01), (kind, name)


KINDS = {
    "v5e": ("TPU v5 lite", "TPU v5e"),
    "v5p": ("TPU v5", "TPU v5p"),
    "v6e": ("TPU v6 lite",),
    "tpu7x": ("TPU7x",),
    "h100": ("NVIDIA H100 80GB HBM3",),
    "b200": ("NVIDIA B200",),
}


@pytest.mark.parametrize("target", HARDWARE)
def test_a_target_and_its_devices_are_one_machine(target):
    assert {hardware.machine_of(kind) for kind in KINDS[target]} == {HARDWARE[target].machine}


def test_a_kind_without_a_machine():
    assert hardware.machine_of("cpu") is None
    for card in ("PCIe", "NVL"):
        assert hardware.machine_of(f"NVIDIA H100 {card}") == "h100-no-nvlink"


@pytest.mark.parametrize("name", machine.NAMES)
def test_every_constant_has_a_source(name):
    loaded = machine.load(name)
    for constant, found in loaded.constants().items():
        assert len(found["source"]) > 5 and found["source"] != "given without a source", constant
    sources = "fitted:|assumed|http|NVIDIA|NDR|one |two |80 GB|141 GB|GPUs|the largest"
    threads = "a thread's figures?, not verified: "  # each names its thread
    assert all(re.match(f"{sources}|{threads}", source) for source in loaded.sources.values()), (
        loaded.sources
    )


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
    "old, new, said",
    [
        (
            "memory: 80e9",
            "",
            "mine.yaml': missing: memory",
        ),
        (
            "latency: 1e-5, ",
            "",
            "missing: link.latency",
        ),
        ("3e12", "-3e12", "mine.yaml': bandwidth must be positive, not -3000000000000.0"),
        ("80e9", "0", "memory must be positive, not 0"),
        ("latency: 1e-5", "latency: -1e-5", "link.latency must not be negative, not -1e-05"),
        ("1e15", "fast", 'flops must be of type float, not "fast"'),
        ("1e15", ".nan", "flops must be a number, not nan"),
        ("1e15", "true", "flops must be of type float, not true"),
        (
            "flops_share: 0.5",
            "flops_share: 50",
            "be a share of the published rate, above 0 and at most 1, not 50.0",
        ),
        ("devices: 4", "devices: 4.5", "devices must be of type int, not 4.5"),
        ("launch: 0", "lunch: 0", "unknown setting 'lunch'; did you mean 'launch'?"),
        (
            "step: 0",
            "step: 0, ring: three-way",
            "unknown value for link.ring: 'three-way'; did you mean",
        ),
        (
            "link: {",
            "link: {network: {size: 8}, ",
            "missing: link.network.step, link.network.bandwidth",
        ),
        (
            "link: {latency: 1e-5, step: 0, bandwidth: 100e9}",
            "link: null",
            "has 4 devices but no link",
        ),
        ("link: {latency: 1e-5, step: 0, bandwidth: 100e9}", "link: 5", "link must be a section"),
        (YAML, "[1, 2", "is not YAML"),
        (YAML, "a machine", "must hold constants such as"),
        (YAML, "based_on: h100-nvlnk", "did you mean 'h100-nvlink'?"),
        (
            YAML,
            "based_on: h100-nvlink\nlink: {one_shot: {bandwidth: null}}",
            "link.KERNEL.bandwidth must be of type float, not null",
        ),
        (
            YAML,
            "based_on: h100-nvlink\nlink: {one_shot: {speed: 1}}",
            "unknown setting 'link.one_shot.speed'",
        ),
        (
            YAML,
            "based_on: h100-nvlink\nlink: {kernels: theirs}",
            "unknown value for link.kernels: 'theirs'",
        ),
        (
            YAML,
            "based_on: h100-nvlink\nlink: {two_shot: {latency: -1e-6}}",
            "link.KERNEL.latency must not be negative",
        ),
    ],
)
def test_a_wrong_file_is_one_line(old, new, said, mistake, tmp_path):
    (tmp_path / "mine.yaml").write_text(YAML.replace(old, new))
    assert said in mistake("predict", "--model", "tiny", "--hardware", "mine.yaml")


@pytest.fixture
def mine(tmp_path):
    """The machine of a user's own file."""

    def load(text):
        (tmp_path / "mine.yaml").write_text(text)
        return machine.load(str(tmp_path / "mine.yaml"))

    return load


def test_a_file_of_ones_own(mine):
    found = mine(YAML)
    assert (found.name, found.devices, found.flops, found.link.bandwidth) == (
        "mine",
        4,
        1e15,
        100e9,
    )
    assert found.sources == {"bandwidth": "a data sheet"}
    assert found.link.network is None


def test_a_file_based_on_another(mine):
    base = machine.load("h100-2-nodes")
    step = "link:\n  network: {step: {value: 9e-6, source: measured}}\n"
    found = mine(f"based_on: h100-2-nodes\n{step}launch: 1e-6\n")
    assert found.link.network == replace(base.link.network, step=9e-6)
    assert found.launch == 1e-6
    assert found.flops_share == base.flops_share
    assert "launch" not in found.sources
    assert found.sources["link.network.step"] == "measured"


def test_kernels_of_a_file_based_on_another(mine):
    link = mine("based_on: h100-nvlink\nlink: {one_shot: null, two_shot: {latency: 9e-6}}").link
    assert link.one_shot is None
    assert link.in_network == H100.link.in_network
    assert link.two_shot == replace(H100.link.two_shot, latency=9e-6)


def test_a_device_without_a_link(mine):
    alone = mine(
        YAML.replace("devices: 4", "devices: 1").replace(YAML.splitlines()[-1], "link: null")
    )
    assert alone.link is None
