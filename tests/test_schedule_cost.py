"""What a compiled program costs (tests/hlo): its FLOPs, the bytes that it moves, and its
timeline.
"""

import collections

import pytest

from ladder_jax import schedule
from ladder_jax.hardware import HARDWARE
from ladder_jax.schedule import cost, hlo, timeline
from tests.hlo import RANKS, SUBLAYER, SUBLAYERS, UNROLLED, D, F, T, parsed, text


@pytest.mark.parametrize(
    "name", [*UNROLLED, "h100-scan", "tpu7x-scan", "h100-standard", "tpu7x-standard"]
)
def test_flops_are_those_of_the_model(name):
    """However the compiler writes a matmul: dot, cuBLAS call, convolution, in fusions and loops."""
    program = parsed(name)
    assert cost.Costs(program).flops_of(program.entry.instructions).total() == SUBLAYERS * SUBLAYER


@pytest.mark.parametrize(
    "op_name, expected", [("layer_1/mlp/dot_general", 2 * 8192 * 128), ("layer_1/reduce_sum", 0)]
)
def test_a_multiplied_sum_is_a_matmul(op_name, expected):
    """A TPU's matmul by one row (a batch-1 decode): multiply, convert, reduce; but no sum of
    another kind.
    """
    program = hlo.parse(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main (a: f32[8192,128], b: f32[8192,128]) -> bf16[128] {\n"
        "  %a = f32[8192,128]{1,0} parameter(0)\n"
        "  %b = f32[8192,128]{1,0} parameter(1)\n"
        "  %m = f32[8192,128]{1,0} multiply(%a, %b)\n"
        "  %c = bf16[8192,128]{1,0} convert(%m)\n"
        "  %z = bf16[] constant(0)\n"
        "  ROOT %r = bf16[128]{0} reduce(%c, %z), dimensions={0}, to_apply=%add, "
        f'metadata={{op_name="{op_name}"}}\n'
        "}\n"
    )
    entry = program.entry
    assert cost.Costs(program).flops_of(entry.instructions[-1:]).total() == expected


MOVES = """HloModule m, is_scheduled=true

%update (p.0: f32[64,256], p.1: f32[1,256], p.2: s32[]) -> f32[64,256] {
  %p.0 = f32[64,256]{1,0} parameter(0)
  %p.1 = f32[1,256]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %u = f32[64,256]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %z)
}

%pick (q.0: f32[64,256], q.1: s32[]) -> f32[2,256] {
  %q.0 = f32[64,256]{1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %z.1 = s32[] constant(0)
  %s = f32[2,256]{1,0} dynamic-slice(%q.0, %q.1, %z.1), dynamic_slice_sizes={2,256}
  ROOT %n = f32[2,256]{1,0} negate(%s)
}

ENTRY %main (a: f32[64,256], b: f32[1,256], i: s32[]) -> f32[2,256] {
  %a = f32[64,256]{1,0} parameter(0)
  %b = f32[1,256]{1,0} parameter(1)
  %i = s32[] parameter(2)
LINES
}
"""


@pytest.mark.parametrize(
    "lines, moved",
    {
        # a row of 1 KiB is read and written in place; 4 bytes say where
        "ROOT %f = f32[64,256]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%update": 2 * 1024 + 4,
        # two rows of 64 are read, and two written
        "ROOT %g = f32[2,256]{1,0} fusion(%a, %i), kind=kLoop, calls=%pick": 2 * 2048 + 4,
        # a whole array: read into on-chip memory once, then used there for nothing
        "%c = (f32[64,256]{1,0:S(1)}, f32[64,256]{1,0}, u32[]{:S(2)}) copy-start(%a)|"
        "%d = f32[64,256]{1,0:S(1)} copy-done(%c)|ROOT %e = f32[64,256]{1,0:S(1)} negate(%d)": 65536,
        # the compiler writes a slice's ends the other way round
        "%c = ((f32[64,256]{1,0}), f32[16,256]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:16],[0:256]}|"
        "ROOT %d = f32[16,256]{1,0:S(1)} slice-done(%c)": 16384,
        # a kernel's operands and results count, whatever its author declared
        'ROOT %k = f32[64,256]{1,0} custom-call(%a), custom_call_target="tpu_custom_call"': 2
        * 65536,
        "ROOT %t = (f32[64,256]{1,0}, f32[1,256]{1,0}) tuple(%a, %b)": 0,
        # a collective's operand, and its result
        "%s = f32[64,256]{1,0} all-reduce-start(%a), replica_groups={}, to_apply=%update|"
        "ROOT %d = f32[64,256]{1,0} all-reduce-done(%s)": 2 * 65536,
        "%s = (f32[1,256]{1,0}, f32[8,256]{1,0}) all-gather-start(%b), replica_groups={}, dimensions={0}|"
        "ROOT %d = f32[8,256]{1,0} all-gather-done(%s)": 2 * 1024,
    }.items(),
)
def test_bytes_moved(lines, moved):
    body = "\n".join("  " + line for line in lines.split("|"))
    assert cost.Costs(hlo.parse(MOVES.replace("LINES", body))).bytes_moved == moved


def test_a_loop_moves_its_bytes_every_turn():
    once, looped = (
        cost.Costs(parsed(name)).bytes_moved for name in ("tpu7x-unrolled", "tpu7x-scan")
    )
    weights = SUBLAYERS * 2 * D * F // RANKS * 2
    # Both copy each layer out of the stack: read, written, read again, and a little for
    # activations.
    assert 3 * weights < once < 4 * weights
    # of three turns: counted once it would be less than 2
    assert 4 * weights < looped < 5 * weights


def test_a_batch_is_a_window_of_a_convolution():
    """A batched matmul [8, 128, 64] x [8, 64, 32], as a TPU compiler writes it: batch as a strided
    window.
    """
    line = "%c = f32[8,128,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}"
    line += ", dim_labels=0bf_0io->0bf"
    body = f"""HloModule c, is_scheduled=true

ENTRY %main (a: f32[8,128,64], b: f32[8,64,32]) -> f32[8,128,32] {{
  %a = f32[8,128,64]{{2,1,0}} parameter(0)
  %b = f32[8,64,32]{{2,1,0}} parameter(1)
  ROOT {line}
}}
"""
    program = hlo.parse(body)
    root = program.entry.instructions[-1]
    assert cost.Costs(program).flops_of([root]).total() == 2 * 8 * 128 * 64 * 32


def test_garbage_estimates_are_skipped():
    one = text("tpu7x-unrolled").replace(
        '"estimated_cycles":"', '"estimated_cycles":"9223372036854775807', 1
    )
    before = schedule.audit(text("tpu7x-unrolled"))
    assert 0 < schedule.audit(one).step_cycles <= before.step_cycles


def test_cycles_are_those_of_what_stands_beside_a_collective():
    found = [one.collective for one in schedule.audit(text("tpu7x-unrolled")).reductions]
    beside = [one for one in found if one.operations]
    assert beside
    assert all(one.cycles > 1000 for one in beside), found


def test_a_timeline_waits_only_for_what_is_exposed():
    """Standard waits for every reduction; Ladder for the last, where the wire is fast enough."""
    waits = {}
    for name in ("standard", "unrolled"):
        program = parsed(f"tpu7x-{name}")
        bars = timeline.play(program, hardware=HARDWARE["tpu7x"], ranks=RANKS)
        compute = [b for b in bars if not b.wire]
        wire = [b for b in bars if b.wire]
        assert len(wire) == SUBLAYERS
        busy = sum(b.stop - b.start for b in compute)
        waits[name] = max(b.stop for b in bars) - busy
        # nothing more: arrays that are on the chip are only joined there
        cycles = cost.Costs(program).total_cycles
        assert busy == pytest.approx(cycles / HARDWARE["tpu7x"].clock, rel=1e-3)
        one = wire[0].stop - wire[0].start
        assert one == pytest.approx(2 * 7 / 8 * T * D * 2 / HARDWARE["tpu7x"].link)
    assert waits["standard"] > 5 * one
    assert waits["unrolled"] < 1.5 * one


def test_a_timeline_repeats_loops():
    bars = timeline.play(parsed("tpu7x-scan"), hardware=HARDWARE["tpu7x"], ranks=RANKS)
    assert sorted(collections.Counter(bar.name for bar in bars if bar.wire).values()) == [1, 3, 3]
