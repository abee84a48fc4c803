"""Compiler options by device kind: which, what an older compiler does with them, and what happens when they fail."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from ladder_jax import decode, nn, parallel, train
from ladder_jax.config import SCANNED, UNROLLED, CollectiveMatmul, Execution, Launch, Loop, Phase, TrainConfig
from ladder_jax.parallel import Compiled, Overlap, Split, Traits, compiled
from ladder_jax.parallel.compiled import options_for
from ladder_jax.parallel.compiler_options import TABLE, Option, When
from ladder_jax.train import gradients
from tests import cases, experts

SPLITS = [frozenset(some) for count in range(3) for some in itertools.combinations(Split, count)]
LAUNCHES = (Launch.CHAINED, Launch.EXPLICIT)
ALL_TRAITS = [Traits(*one) for one in itertools.product(Overlap, Phase, Loop, SPLITS, CollectiveMatmul, LAUNCHES)]
V5E, V5P, TPU7X, H100 = "TPU v5 lite", "TPU v5", "TPU7x", "NVIDIA H100 80GB HBM3"


def test_every_option_says_where_it_is_known_from():
    for rows in TABLE.values():
        assert all(len(row.why) > 20 and row.overlap and row.phases and row.loops for row in rows)


@pytest.mark.parametrize("kind", TABLE)
def test_no_two_rows_set_one_option(kind):
    for traits in ALL_TRAITS:
        rows = [row.name for row in TABLE[kind] if row.serves(traits) and row.when is When.ALWAYS]
        assert len(rows) == len(set(rows))


def test_each_kind_of_program_has_its_own():
    hides = lambda phase, loop=Loop.UNROLLED: Traits(Overlap.HIDES, phase, loop)
    waits = Traits(Overlap.WAITS, Phase.DECODE, Loop.UNROLLED)
    kernels = "xla_gpu_experimental_use_collective_kernels"
    assert options_for(H100, hides(Phase.DECODE))[kernels] == ""
    assert kernels not in options_for(H100, hides(Phase.PREFILL)) and kernels not in options_for(H100, waits)
    assert kernels not in options_for(H100, dataclasses.replace(hides(Phase.DECODE), launch=Launch.EXPLICIT))
    assert options_for(H100, waits) == {"xla_gpu_enable_latency_hiding_scheduler": True}
    # Small ones are fastest on the TensorCore; matrices are streamed in either topology.
    assert list(options_for(V5P, waits)) == ["xla_tpu_scoped_vmem_limit_kib"]
    assert options_for(V5P, dataclasses.replace(waits, loop=Loop.SCAN)) == {}
    assert "xla_tpu_enable_sparse_core_collective_offload_all_reduce" in options_for(V5P, hides(Phase.PREFILL))
    assert options_for(TPU7X, hides(Phase.PREFILL)) == {}
    assert "xla_tpu_scoped_vmem_limit_kib" in options_for(V5E, hides(Phase.PREFILL, Loop.SCAN))
    assert "xla_tpu_scoped_vmem_limit_kib" in options_for(V5E, hides(Phase.TRAIN))
    assert "xla_tpu_scoped_vmem_limit_kib" not in options_for(V5E, hides(Phase.PREFILL))
    assert "xla_tpu_scoped_vmem_limit_kib" in options_for(V5E, hides(Phase.PREFILL), when=When.RESCUE)
    assert all(options_for("cpu", traits) == {} for traits in ALL_TRAITS)
    earlier = "xla_tpu_sparse_core_all_reduce_latency_multiplier"
    assert earlier in options_for("TPU v6 lite", hides(Phase.TRAIN))
    assert earlier not in options_for("TPU v6 lite", hides(Phase.PREFILL))
    assert options_for("TPU v5p", hides(Phase.PREFILL)) == options_for(V5P, hides(Phase.PREFILL))


def test_what_is_split_has_its_own():
    offload = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"
    for overlap, phase in itertools.product(Overlap, (Phase.PREFILL, Phase.TRAIN)):
        one = lambda *split: Traits(overlap, phase, Loop.UNROLLED, frozenset(split))
        assert all(offload in options_for("TPU v6e", one(split)) for split in (Split.WEIGHTS, Split.SEQUENCE))
        assert offload not in options_for("TPU v6e", one())
        limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
        rows = {Split.ROWS} if overlap is Overlap.HIDES else set()  # Standard's own overlap needs one at a time
        assert all((limit in options_for(H100, one(*s))) == bool(s & {Split.WEIGHTS} | s & rows) for s in SPLITS)
    split = cases.define("ladder", fsdp=2, tensor=2, num_kv_heads=2).traits(
        Execution(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING), phase=Phase.TRAIN
    )
    assert split.split == {Split.WEIGHTS, Split.SEQUENCE} and split.collective_matmul is CollectiveMatmul.RING


def test_exchanged_rows_have_their_own():
    definition = nn.define(
        experts.model("ladder", moe={**experts.KINDS["shared"], "capacity": 1.0}),
        mesh=parallel.make_mesh(tensor=2),
        experts="exchange",
    )
    whole, split = (
        definition.traits(Execution(loop=Loop.UNROLLED, sequence_parallel=is_split), phase=Phase.PREFILL)
        for is_split in (False, True)
    )
    for kind in (V5P, "TPU v6e", TPU7X):
        assert options_for(kind, split)["xla_tpu_enable_async_all_to_all"] is True
        assert "xla_tpu_enable_async_all_to_all" not in options_for(kind, whole)


def test_each_form_of_collective_matmul_has_its_own():
    one = lambda form: Traits(Overlap.WAITS, Phase.PREFILL, Loop.UNROLLED, frozenset({Split.SEQUENCE}), form)
    modes = {f"xla_tpu_{kind}_collective_matmul_mode" for kind in ("all_gather", "reduce_scatter")}
    for kind in (V5E, V5P, TPU7X, "TPU v6e"):
        found = {form: set(options_for(kind, one(form))) for form in CollectiveMatmul}
        assert found[CollectiveMatmul.COMPILER] - found[CollectiveMatmul.NONE] == modes
        assert found[CollectiveMatmul.RING] == found[CollectiveMatmul.NONE]
    both_ways = "xla_gpu_experimental_parallel_collective_overlap_limit"
    assert both_ways in options_for(H100, one(CollectiveMatmul.RING))
    assert both_ways not in options_for(H100, one(CollectiveMatmul.NONE))


def test_experts_rows_are_not_gathered_where_sums_are_reduced():
    gather, settings = (
        "xla_tpu_offload_gather_to_sparsecore",
        dict(execution=UNROLLED, phase=Phase.PREFILL),
    )
    traits = {name: experts.define(name, tensor=2).traits(**settings) for name in ("farskip", "standard")}
    dense = cases.define("ladder", tensor=2).traits(**settings)
    for kind in (V5P, "TPU v6e", TPU7X):
        assert options_for(kind, traits["farskip"])[gather] is False
        assert gather not in options_for(kind, dense) and gather not in options_for(kind, traits["standard"])


def test_what_a_reduction_takes_is_believed_to_be_longer_beside_experts():
    longer, settings = (
        "xla_tpu_sparse_core_all_reduce_latency_multiplier",
        dict(execution=SCANNED, phase=Phase.TRAIN),
    )
    traits = {name: experts.define(name, tensor=2).traits(**settings) for name in ("ladder", "standard")}
    dense = cases.define("ladder", tensor=2).traits(**settings)
    found = lambda kind, traits: options_for(kind, traits).get(longer)
    for kind, of_dense in ((V5P, None), ("TPU v6e", 3.0), (TPU7X, None)):
        assert (found(kind, traits["ladder"]), found(kind, dense)) == (20.0, of_dense)
        assert found(kind, traits["standard"]) is None


def test_what_a_topology_needs():
    waiting = {"standard", "parallel", "parallel-shared-norm", "no-communication"}
    for name in cases.TOPOLOGIES:
        found = cases.define(name, tensor=4).topology.overlap
        assert found is (Overlap.WAITS if name in waiting or name.startswith("desync") else Overlap.HIDES), name


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


OUT_OF_MEMORY = (
    "FAILED_PRECONDITION: the value requires allocation in the alternate memory, which could not be satisfied"
)


@pytest.mark.parametrize("good", [{"a": 1, "b": 2}, {}], ids=str)
def test_failing_options_fall_back_with_a_notice(good, monkeypatch, caplog):
    monkeypatch.setattr(
        compiled,
        "compile_options",
        lambda mesh, traits, when=When.ALWAYS: {"a": 1} if when is When.ALWAYS else {"b": 2},
    )
    failing = Failing(monkeypatch, OUT_OF_MEMORY, good)
    program = Compiled(lambda x: x + 1, mesh=None, traits=ALL_TRAITS[0])
    assert program(1) == 2 and program.options == good
    expected = [{"a": 1}, {"a": 1, "b": 2}, {}]
    assert failing.tried == expected[: expected.index(good) + 1]
    assert "the compiler fails with a; now with a, b" in caplog.text
    assert ("no options, so reductions are synchronous" in caplog.text) == (good == {})
    assert program(2) == 3 and failing.tried[-2:] == [good, good]  # and does not try again


def test_other_failures_are_not_hidden(monkeypatch):
    monkeypatch.setattr(compiled, "compile_options", lambda mesh, traits, when=When.ALWAYS: {"a": 1})
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
    assert float(Compiled(jnp.sin, mesh=parallel.make_mesh(), traits=ALL_TRAITS[0])(jnp.float32(0))) == 0
