"""Prefill, decode, sampling and generation against the reference, the full forward pass and
NumPy.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ladder_jax import decode, nn, parallel
from ladder_jax.config import DecodeConfig, Launch, Loop
from ladder_jax.decode import steps, weights
from tests import cases, communication, covering, engines, one_step
from tests.refusals import refused
from tests.together import together

LENGTHS = np.array([1, 4, 6, 3], np.int32)
SHARDED = (2, 4), (1, 8)  # data x tensor
MESHES = (*SHARDED, (1, 1))
CASES = covering.marked(
    itertools.product(cases.TOPOLOGIES, MESHES, Loop),
    chosen=[
        *covering.array(cases.TOPOLOGIES, SHARDED, Loop, pairs=[(1, 2)], even=[1, 2]),
        ("ladder-fresh", (1, 1), Loop.SCAN),
        ("desync-3", (1, 1), Loop.UNROLLED),
    ],
)


def on_mesh(name, mesh, loop):
    if mesh == (1, 1) and loop is Loop.SCAN and name not in cases.DEPEND_ON_RANKS:
        mesh = (4, 2)  # one device with a scan is kept for the emulated ranks
    return cases.on_mesh(name, *mesh)


def make_logits(name, mesh, loop):
    definition, full = on_mesh(name, mesh, loop)
    programs = cases.programs(definition, loop=loop)
    logits = cases.prefill_and_decode(programs, LENGTHS, full.shape[:2], new=3)
    return logits, (weights.prepare(definition, cases.placed(definition), loop=loop),)


found_logits = together(make_logits, CASES)


@pytest.mark.parametrize("name, mesh, loop", CASES)
def test_prefill_and_decode_equal_the_full_pass(name, mesh, loop):
    definition, full = on_mesh(name, mesh, loop)
    found, _ = found_logits(name, mesh, loop)
    cases.check_logits(found, LENGTHS, full, limit=2 * cases.bound(definition.config))


def test_a_layer_hands_over_its_matrices_alone():
    """Each array costs the host time in every call: 7 a layer, two gains of all, and three."""
    shapes = weights.abstract(cases.define("ladder", num_layers=5), loop=Loop.UNROLLED)
    assert len(jax.tree.leaves(shapes)) == 7 * 5 + 2 + 3


def generator(name="ladder", **mesh):
    definition = cases.define(name, num_layers=1, **mesh)
    return decode.Generator(definition, cases.placed(definition))


PROMPTS = [[1, 2, 3], [200], list(range(40))]


@pytest.mark.parametrize(
    "data, temperature", covering.marked(itertools.product([1, 2], [0.0, 1.0]), chosen=[(2, 1.0)])
)
def test_the_same_seed_gives_the_same_tokens_on_every_mesh(data, temperature):
    config = DecodeConfig(max_new_tokens=20, temperature=temperature, seed=5)
    expected = generator().tokens(PROMPTS, config=config)
    assert expected.shape == (3, 20)
    assert expected.max() < 251
    assert_array_equal(generator(data=data, tensor=4).tokens(PROMPTS, config=config), expected)
    if temperature:
        other = dataclasses.replace(config, seed=6)
        assert not np.array_equal(generator().tokens(PROMPTS, config=other), expected)


def test_greedy_generation_is_the_argmax_of_the_full_pass():
    """Every token of every row, from the logits of a pass over all that came before it."""
    definition, params = engines.parts(tensor=4, num_layers=2)
    ours = decode.Generator(definition, params)
    new = ours.tokens(PROMPTS, config=DecodeConfig(max_new_tokens=18))
    whole = np.zeros((3, 58), np.int32)  # what follows a row's end is not seen
    for prompt, tokens, row in zip(PROMPTS, new, whole):
        row[: len(prompt) + 18] = *prompt, *tokens
    best = nn.compiled_logits(definition)(params, whole).argmax(-1)
    for prompt, tokens, row in zip(PROMPTS, new, best):
        assert_array_equal(row[len(prompt) - 1 :][:18], tokens)


@pytest.mark.parametrize(
    "message, prompts",
    {
        "no prompt": [],
        "prompt is empty": [[]],
        "token 251, outside": [[1, 251], [-1]],
    }.items(),
)
def test_impossible_prompts(prompts, message):
    with refused(message):
        generator().tokens(prompts, config=DecodeConfig())


# of 4 layers
HALVED = {"ladder": 7, "ladder-2": 7, "ladder-fresh": 7, "parallel-ladder": 3, "hybrid-delay-2": 4}


@pytest.mark.parametrize(
    "name, loop",
    covering.marked(itertools.product(HALVED, Loop), chosen=[*zip(HALVED, itertools.cycle(Loop))]),
)
def test_all_reduces_in_halves_compute_the_same(name, loop, monkeypatch):
    """What the topologies make of them, against the reference. `make audit` compiles it for TPUs
    and GPUs, where its values have not been seen yet.
    """
    started = communication.start_on_a_cpu(monkeypatch)
    definition = cases.define(name, tensor=8)
    prefill = decode.prefill.__wrapped__(definition, capacity=12, loop=loop)
    assert prefill.traits.launch is Launch.EXPLICIT  # by default, where it is supported
    of_prefill = []

    def counted(*inputs):
        outputs = prefill(*inputs)
        of_prefill.extend(started)
        return outputs

    step = one_step.decode.__wrapped__(definition, loop=loop)
    stored = weights.prepare(definition, cases.placed(definition), loop=loop)
    full, limit = cases.dense_logits(name, 8), 2 * cases.bound(definition.config)
    cases.check_prefill_and_decode((counted, step), stored, LENGTHS, full, new=3, limit=limit)
    assert 0 < len(of_prefill) < len(started)
    if loop is Loop.UNROLLED:
        assert len(of_prefill) == HALVED[name]


def test_chained_and_waiting_programs_and_sequence_parallelism_start_nothing(monkeypatch):
    started = communication.start_on_a_cpu(monkeypatch)
    split = dict(capacity=12, sequence_parallel=True)
    for name, how in (
        ("ladder", dict(capacity=12, launch=Launch.CHAINED)),
        ("standard", dict(capacity=12, launch=Launch.EXPLICIT)),
        ("ladder", split),
    ):
        program = decode.prefill.__wrapped__(cases.define(name, tensor=8), **how)
        assert program.traits.launch is Launch.CHAINED
        assert not started
    with refused("launch 'explicit' halves all-reduces, and sequence parallelism has none"):
        decode.prefill(cases.define("ladder", tensor=8), **split, launch=Launch.EXPLICIT)


@pytest.mark.parametrize("kind", ["cpu", "TPU v5 lite", "TPU v4", "AMD Instinct MI300X"])
def test_halves_where_they_are_not_supported(kind, monkeypatch):
    definition = cases.define("ladder", tensor=2)
    monkeypatch.setattr(type(jax.devices()[0]), "device_kind", kind)
    said = f"launch 'explicit' is for NVIDIA GPUs and for TPUs from v5p on, not for {kind}: use"
    for program in decode.decode_many, functools.partial(decode.prefill, capacity=12), steps.extend:
        with refused(said):
            program(definition, launch=Launch.EXPLICIT)
    assert parallel.resolve_launch(Launch.AUTO, mesh=definition.layout.mesh) is Launch.CHAINED


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "TPU v5", "TPU v5p", "TPU v6e", "TPU7x"])
def test_halves_where_they_are(kind, monkeypatch):
    mesh = cases.define("ladder", tensor=2).layout.mesh
    monkeypatch.setattr(type(jax.devices()[0]), "device_kind", kind)
    gpu = kind.startswith("NVIDIA")
    chosen = Launch.CHAINED if gpu and jax.__version_info__ < (0, 12) else Launch.EXPLICIT
    assert parallel.resolve_launch(Launch.AUTO, mesh=mesh) is chosen
    assert parallel.resolve_launch(Launch.CHAINED, mesh=mesh) is Launch.CHAINED
    if gpu:
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    else:
        monkeypatch.delattr(jax._src.lax.parallel, "psum_start")
    assert parallel.resolve_launch(Launch.AUTO, mesh=mesh) is Launch.CHAINED
    with refused("needs a jax with started collectives, and .* has none: use 'auto'"):
        parallel.resolve_launch(Launch.EXPLICIT, mesh=mesh)


@pytest.mark.parametrize("ranks", [None, 4])
def test_one_device_has_nothing_to_launch(ranks):
    decode.decode_many(cases.define("ladder-fresh", ranks=ranks), launch=Launch.EXPLICIT)
