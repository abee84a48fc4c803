"""Compiler options by device kind: which, what an older compiler does with them, and what happens
when they fail.
"""

import itertools

import jax
import pytest

from ladder_jax import decode, nn, parallel, train
from ladder_jax.config import CollectiveMatmul, Execution, Launch, Loop, Phase, TrainConfig
from ladder_jax.parallel import Compiled, Overlap, Split, Traits, compiled
from ladder_jax.parallel.compiled import options_for
from ladder_jax.parallel.compiler_options import TABLE, Option
from ladder_jax.train import gradients
from tests import cases, experts

SPLITS = [frozenset(some) for count in range(3) for some in itertools.combinations(Split, count)]
LAUNCHES = (Launch.CHAINED, Launch.EXPLICIT)
ALL_TRAITS = [
    Traits(*one)
    for one in itertools.product(Overlap, Phase, Loop, SPLITS, CollectiveMatmul, LAUNCHES)
]
V5E = "TPU v5 lite"
V5P = "TPU v5"
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("kind", TABLE)
def test_no_two_rows_set_one_option(kind):
    for traits in ALL_TRAITS:
        rows = [row.name for row in TABLE[kind] if row.serves(traits) and not row.rescue]
        assert len(rows) == len(set(rows))


def test_each_kind_of_program_has_its_own():
    hides = lambda phase: Traits(Overlap.HIDES, phase, Loop.UNROLLED)
    waits = Traits(Overlap.WAITS, Phase.DECODE, Loop.UNROLLED)
    kernels = "xla_gpu_experimental_use_collective_kernels"
    limit = "xla_tpu_scoped_vmem_limit_kib"
    assert options_for(H100, hides(Phase.DECODE))[kernels] == ""
    assert kernels not in options_for(H100, waits)
    assert limit not in options_for(V5E, hides(Phase.PREFILL))
    assert limit in options_for(V5E, hides(Phase.PREFILL), rescue=True)
    assert all(options_for("cpu", traits) == {} for traits in ALL_TRAITS)
    assert options_for("TPU v5p", hides(Phase.PREFILL)) == options_for(V5P, hides(Phase.PREFILL))


def test_what_a_definition_splits():
    split = lambda definition, **more: definition.traits(Execution(**more), phase=Phase.TRAIN).split
    dense = cases.define("ladder", fsdp=2, tensor=2, num_kv_heads=2)
    assert split(dense) == {Split.WEIGHTS}
    assert split(dense, sequence_parallel=True) == {Split.WEIGHTS, Split.SEQUENCE}
    assert split(experts.define("ladder", tensor=2)) == {Split.EXPERTS}
    shared = experts.model("ladder", moe={**experts.KINDS["shared"], "capacity": 1.0})
    exchanged = nn.define(shared, mesh=parallel.make_mesh(tensor=2), experts="exchange")
    assert Split.ROWS in split(exchanged, sequence_parallel=True)
    assert Split.ROWS not in split(exchanged)


def test_what_a_topology_needs():
    waiting = {"standard", "parallel", "parallel-shared-norm", "no-communication"}
    for name in cases.TOPOLOGIES:
        assert cases.define(name, tensor=4).topology.overlap is (
            Overlap.WAITS if name in waiting or name.startswith("desync") else Overlap.HIDES
        ), name


@pytest.fixture
def on_cpu(monkeypatch):
    """Gives the CPU a table of its own."""

    def put(*rows):
        monkeypatch.setitem(TABLE, jax.devices()[0].device_kind, rows)
        return Traits(Overlap.HIDES, Phase.PREFILL, Loop.SCAN)

    return put


def option(name, value, **more):
    return Option(name, value, "for this test, and nowhere else", **more)


def test_unknown_options_are_dropped_with_a_notice(on_cpu, caplog):
    traits = on_cpu(option("xla_no_such_option", True), option("xla_cpu_enable_fast_math", False))
    found = parallel.compile_options(parallel.make_mesh(), traits=traits)
    assert found == {"xla_cpu_enable_fast_math": False}
    assert "does not know xla_no_such_option: dropped" in caplog.text


def test_an_option_with_a_wrong_value_is_an_error(on_cpu):
    traits = on_cpu(option("xla_cpu_enable_fast_math", "perhaps"))
    with pytest.raises(jax.errors.JaxRuntimeError):
        parallel.compile_options(parallel.make_mesh(), traits=traits)


class Failing:
    """A jitted function that a compiler refuses with some options."""

    def __init__(self, monkeypatch, message, good):
        self.tried = []

        def jit(fn, compiler_options, **_):
            def call(*args):
                self.tried.append(compiler_options)
                if compiler_options != good:
                    raise jax.errors.JaxRuntimeError(message)
                return fn(*args)

            return call

        monkeypatch.setattr(jax, "jit", jit)


OUT_OF_MEMORY = "FAILED_PRECONDITION: the value requires allocation in the alternate memory"


@pytest.mark.parametrize("good", [{"a": 1, "b": 2}, {}], ids=str)
def test_failing_options_fall_back_with_a_notice(good, monkeypatch, caplog):
    options = {(ALL_TRAITS[0], False): {"a": 1}, (ALL_TRAITS[0], True): {"b": 2}}
    monkeypatch.setattr(
        compiled,
        "compile_options",
        lambda mesh, traits, rescue=False: options[traits, rescue],
    )
    failing = Failing(monkeypatch, OUT_OF_MEMORY, good)
    program = Compiled(lambda x: x + 1, mesh=None, traits=ALL_TRAITS[0])
    assert program(1) == 2
    assert program.options == good
    expected = [{"a": 1}, {"a": 1, "b": 2}, {}]
    assert failing.tried == expected[: expected.index(good) + 1]
    assert "the compiler fails with a; now with a, b" in caplog.text
    assert ("no options, so reductions are synchronous" in caplog.text) == (good == {})
    assert program(2) == 3
    assert failing.tried[-2:] == [good, good]  # and does not try again


def test_other_failures_are_not_hidden(monkeypatch):
    monkeypatch.setattr(compiled, "compile_options", lambda mesh, traits, rescue=False: {"a": 1})
    failing = Failing(monkeypatch, "INTERNAL: something else", {})
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        Compiled(lambda x: x, mesh=None, traits=ALL_TRAITS[0])(1)
    assert len(failing.tried) == 1


def test_train_and_decode_hand_them_over(on_cpu):
    on_cpu(option("xla_cpu_enable_fast_math", False))
    compiled._known.cache_clear()
    definition = cases.define("ladder", tensor=2, num_kv_heads=2)
    programs = [
        train.train_step(definition, config=TrainConfig(steps=1, batch=1, sequence=4)),
        gradients.held_out_loss(train.Pretraining(definition)),
        nn.compiled_logits.__wrapped__(definition),
        decode.prefill.__wrapped__(definition, capacity=8),
        decode.decode_many.__wrapped__(definition, count=2),
    ]
    assert all(program.options == {"xla_cpu_enable_fast_math": False} for program in programs)
    standard = cases.define("standard", tensor=2, num_kv_heads=2)
    assert decode.decode_many.__wrapped__(standard, count=2).options == {}
