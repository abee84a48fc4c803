"""Experts in the audit, the speed model, the planner and `bench`: what is active and what is held,
by hand.
"""

import fractions
import itertools
import json
from dataclasses import replace

import jax
import pytest

from ladder_jax import nn, parallel
from ladder_jax.config import MeshConfig, MoEConfig, Phase, Remat, preset
from ladder_jax.hardware import HARDWARE
from ladder_jax.nn.parameter import is_matrix
from ladder_jax.overlap import request as requests
from ladder_jax.plan import memory, request as plan_requests, speed as plan_speed
from ladder_jax.plan.request import Candidate
from ladder_jax.predict import request as predict_requests, work
from ladder_jax.schedule import grouped, hlo, models
from ladder_jax.schedule.cost import Costs
from ladder_jax.schedule.grouped import Experts, Form

QWEN = preset("qwen3-30b-a3b")
D = 2048
M = 768
E = 128
K = 8
EIGHTH = Experts(QWEN.moe, 8)
ROUTED = ("router", "sort", "experts' gate, up", "activate", "experts' down", "add up")

# Instructions as the compilers write them, without the kernels' code.
FORWARD = """%ragged-dot-none.1 = bf16[128,768]{1,0:T(8,128)(2,1)S(1)} custom-call(%sizes, %rows, %matrices),\
 custom_call_target="tpu_custom_call", operand_layout_constraints={s32[17]{0}, bf16[128,2048]{1,0},\
 bf16[16,2048,768]{2,1,0}}, frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="128,2048,768"},\
 metadata={op_name="jit(local)/shard_map/layer_0/mlp/ragged_dot_general/ragged-dot-none"}"""
OVER_ROWS = """%ragged-dot-none.7 = f32[16,2048,768]{2,1,0:T(8,128)} custom-call(%sizes, %rows, %gradient#0),\
 custom_call_target="tpu_custom_call", operand_layout_constraints={s32[17]{0}, bf16[128,2048]{1,0},\
 bf16[128,768]{1,0}}, frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="128,2048,128"},\
 metadata={op_name="jit(step)/shard_map/transpose(jvp(layer_0))/mlp/ragged_dot_general/ragged-dot-none"}"""
TRITON = """%pallas_call.32 = bf16[128,768]{1,0} custom-call(%rows, %matrices, %sizes),\
 custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={bf16[128,2048]{1,0}, bf16[16,2048,768]{2,1,0},\
 s32[17]{0}}, metadata={op_name="jit(local)/shard_map/layer_0/mlp/grouped_matmul/pallas_call"}"""
TILES = """%ragged-dot-metadata = (s32[17]{0}, s32[1]{0}) custom-call(%sizes), custom_call_target="tpu_custom_call",\
 metadata={op_name="ragged-dot-metadata"}"""
EXPANDED = """%dot.83 = bf16[128,768]{1,0} dot(%expanded, %flat), lhs_contracting_dims={1}, rhs_contracting_dims={0},\
 metadata={op_name="jit(local)/shard_map/layer_0/mlp/ragged_dot_general"}"""
MODULE = """HloModule jit_local, is_scheduled=true

ENTRY %main (rows: bf16[128,2048]) -> bf16[128,768] {{
  %rows = bf16[128,2048]{{1,0}} parameter(0)
  %sizes = s32[17]{{0}} parameter(1)
  %matrices = bf16[16,2048,768]{{2,1,0}} parameter(2)
  %gradient = (bf16[128,768]{{1,0}}, f32[9]{{0}}) parameter(3)
  %expanded = bf16[128,32768]{{1,0}} parameter(4)
  %flat = bf16[32768,768]{{1,0}} parameter(5)
  ROOT {}
}}
"""
ROWS = 128  # of 16 tokens
CHOSEN = E / 8 * (1 - (1 - K / E) ** 16)  # a device's experts


def counted(line, experts):
    program = hlo.parse(MODULE.format(line))
    one = program.entry.instructions[-1]
    return program, one, grouped.kernel(one, experts=experts)


@pytest.mark.parametrize("line, moved", [
    (FORWARD, ROWS / 8 * D * 2 + CHOSEN * D * M * 2),  # the result is on the chip
    (TRITON, ROWS / 8 * (D + M) * 2 + CHOSEN * D * M * 2),
    # gradients of all of the device's experts
    (OVER_ROWS, ROWS / 8 * (D + M) * 2 + 16 * D * M * 4),
], ids=["tpu", "gpu", "over rows"])  # fmt: skip
def test_a_kernel_computes_its_own_rows_and_reads_the_chosen_experts(line, moved):
    program, instruction, one = counted(line, EIGHTH)
    assert one.flops == 2 * ROWS / 8 * D * M
    assert one.bytes == pytest.approx(moved)
    assert Costs(program, experts=EIGHTH).bytes_moved == round(moved)
    assert Costs(program, experts=EIGHTH).flops_of([instruction]) == {"mlp": one.flops}
    assert grouped.form(program) is Form.KERNELS


def test_of_an_unknown_model_all_rows_and_matrices_count():
    program, instruction, one = counted(FORWARD, None)
    assert one.flops == 2 * ROWS * D * M
    assert one.bytes == (ROWS * D + 16 * D * M) * 2
    assert Costs(program).cycles(instruction) == 0


def test_what_finds_the_tiles_is_no_matmul():
    assert counted(TILES, None)[-1] is None


def test_a_kernel_takes_as_long_as_reading_or_its_whole_tiles():
    v5p = HARDWARE["v5p"]
    experts = Experts(QWEN.moe, 8, v5p)
    *_, one = counted(FORWARD, experts)
    # 16 rows, but of 10 experts a tile of 128 each
    assert one.seconds(v5p) == one.bytes / v5p.bandwidth
    slow = replace(v5p, flops=1e12)
    assert one.seconds(slow) == pytest.approx(2 * (ROWS / 8 + CHOSEN * 127) * D * M / 1e12)
    # Cycles are given where the compiler estimates those of the others.
    cycles = lambda text: Costs(hlo.parse(text), experts=experts).total_cycles
    estimated = MODULE.format(FORWARD).replace(
        "  ROOT",
        '  %copy.1 = s32[17]{0} copy(%sizes), backend_config={"estimated_cycles":"1000"}\n  ROOT',
    )
    assert cycles(MODULE.format(FORWARD)) is None
    assert cycles(estimated) == 1000 + round(one.seconds(v5p) * v5p.clock)


def test_where_xla_expands_every_row_passes_every_expert():
    program, instruction, one = counted(EXPANDED, EIGHTH)
    assert one is None
    assert grouped.form(program) is Form.EXPANDED
    assert Costs(program).flops_of([instruction]) == {"mlp": 16 * 2 * ROWS * D * M}
    request = requests.make(
        model="qwen3-30b-a3b", target="h100:8", residual="ladder", phase=Phase.DECODE
    )
    by_form = {form: requests.sublayer_flops(request, form=form) for form in Form}
    assert by_form[Form.KERNELS]["mlp"] == 2 * 16 * (D * E + K / 8 * 3 * D * M)
    assert by_form[Form.EXPANDED]["mlp"] == 2 * 16 * (D * E + K * 16 * 3 * D * M)
    assert by_form[Form.EXPANDED]["attention"] == by_form[Form.KERNELS]["attention"]


@pytest.mark.parametrize("experts, top_k, tokens", [(4, 2, 3), (5, 1, 4), (3, 3, 1)])
def test_how_many_experts_are_chosen(experts, top_k, tokens):
    """Over all choices of all tokens."""
    each = list(itertools.combinations(range(experts), top_k))
    counts = [len(set(itertools.chain(*one))) for one in itertools.product(each, repeat=tokens)]
    expected = fractions.Fraction(sum(counts), len(counts) * experts)
    assert MoEConfig(experts=experts, top_k=top_k).chosen(tokens) == pytest.approx(float(expected))


def test_parameters_held_and_active():
    found = models.parameters(QWEN)
    assert round(found["parameters"] / 1e9, 1) == 30.5
    assert round(found["parameters_active"] / 1e9, 2) == 3.35
    for name, dense in (("tiny-moe", 0), ("qwen1.5-moe-a2.7b", 0), ("tiny-moe", 2)):
        one = preset(name, num_layers=3, vocab_size=256, moe=dict(dense_layers=dense))
        definition = nn.define(one, mesh=parallel.make_mesh())
        config = definition.config
        count = models.parameters(config)
        leaves = zip(
            jax.tree.leaves(definition.abstract), jax.tree.leaves(definition.dims), strict=True
        )
        assert count["parameters"] == sum(leaf.size for leaf, dims in leaves if is_matrix(dims))
        assert (
            count["parameters_active"]
            == nn.model_def.matrix_elements(definition) + config.vocab_size * config.d_model
        )
    dense = models.parameters(preset("tiny"))
    assert dense["parameters"] == dense["parameters_active"]


@pytest.mark.usefixtures("compiled_here")
def test_overlap_reports_them(prints):
    told = lambda words: prints("overlap", *words.split())
    words = "--model tiny-moe --target cpu:2 --phase prefill --residual farskip --layers 1 --prompt-length 16"
    found = json.loads(told(f"{words} --json"))
    assert (found["all_reduces"], found["grouped_matmuls"]) == (2, "expanded")
    assert models.parameters(preset("tiny-moe", num_layers=1)).items() <= found.items()
    attention = 2 * 128 * (128 + 64)
    router = 128 * 8
    expert = 3 * 128 * 128
    assert found["flops_active"] == 2 * (16 * (attention / 2 + router + 3 / 2 * expert) + 128 * 128)
    expanded = 16 * (2 * 4 - 2 / 2) * expert * 2  # 4 experts a device, for each of 2 choices
    scores = 2 * 2 * 4 * 16 * 16 * 16  # of 4 heads of 16, the masked half too
    assert found["flops"] == found["flops_active"] + expanded + scores
    exchanged = "--sequence-parallel --experts exchange --capacity 4 --json"
    rows = json.loads(told(f"{words} {exchanged}"))
    assert (rows["all_to_alls"], rows["grouped_matmuls"]) == (2, "buffers")
    # of a device's 4 experts, for each of two ranks' 8 tokens
    places = (4 * 2 * 8 - 16) * expert * 2
    # a rank routes its own tokens
    assert rows["flops"] == rows["flops_active"] + places + scores - 8 * router * 2


def test_predicted_kernels():
    """A decode step of 16 rows: the router's float32 matrix, the products of this device's rows."""
    ours = work.Model(QWEN, 8)
    block = ours.decode_step(rows=16, prompt_length=1024, new_tokens=512)
    kernels = {one.name: one for one in ours.step((work.MLP,), block)}
    assert kernels["router"].weights == 4 * D * E
    assert kernels["router"].flops == 2 * 16 * D * E
    assert kernels["experts' gate, up"].flops == 2 * (16 * K / 8) * D * 2 * M
    assert kernels["experts' down"].weights == pytest.approx(CHOSEN * M * D * 2)
    assert kernels["sort"].activations == 2 * 16 * K * D * 2
    assert list(kernels) == ["norm", *ROUTED]
    # of more ranks than experts the busiest has as many as of as many ranks
    (few, more) = ({one.name: one for one in work.Model(QWEN, n).routed(block)} for n in (128, 256))
    assert more["experts' down"] == few["experts' down"]


def test_predicted_shared_expert():
    """In farskip it is computed alone, in other topologies behind the routed ones."""
    names = lambda residual, sublayers: [
        one.name
        for one in work.Model(preset("qwen1.5-moe-a2.7b", residual=residual), 4).step(
            sublayers, work.Block(1, 64, 32, 64)
        )
    ]
    dense = ["gate, up", "activate", "down"]
    assert names("ladder", (1,)) == ["norm", *ROUTED, *dense]
    assert names("farskip", (1,)) == ["norm", *ROUTED]
    assert names("farskip", (2,)) == [
        "norm",
        *dense,
    ]
    assert names("farskip", (1, 2)) == ["norm", *ROUTED, *dense]


def test_predict_offers_what_experts_allow():
    one = predict_requests.make(model="qwen1.5-moe-a2.7b", hardware="v5p", tensor=4)
    assert "farskip" in one.residuals
    assert not {"ladder-fresh", "desync-2"} & set(one.residuals)
    assert "farskip" not in predict_requests.make(model="qwen3-30b-a3b", hardware="v5p").residuals


def test_plan_holds_all_and_computes_the_active():
    request = plan_requests.make(
        model="qwen3-30b-a3b", target="v5p:4x4x4", tokens=64 * 4096, sequence=4096
    )
    one = Candidate(request, MeshConfig(fsdp=16, tensor=4), Remat.NONE, False, 1, 4)
    shard = models.shard(QWEN, ranks=4)
    held = 48 * (shard.attention + D * E + 32 * 3 * D * M) + 2 * shard.vocabulary * D
    assert memory.estimate(one).state == 12 * (held // 16)
    forward, recomputed = plan_speed.flops(one)
    head = QWEN.vocab_size / 4 * D
    active = 48 * (shard.attention + D * E / 4 + K / 4 * 3 * D * M) + head
    scores = 48 * 2 * 8 * 128 * 4096 * 4097
    assert forward == 2 * 4096 * active + scores
    assert recomputed == 0
    # Recomputed are all but the head and attention's last product, whose reduced sum is kept; the
    # router on each rank, which counts once forward.
    kept = 48 * 8 * 128 * D + head - 48 * D * E * 3 / 4
    full = replace(one, remat=Remat.FULL)
    assert plan_speed.flops(full)[1] == forward - 2 * 4096 * kept
    # Of more tokens than a chunk no rows are kept; the experts are computed again.
    large = replace(one, rows=4, accumulate=1)
    assert plan_speed.flops(large)[1] == 48 * 2 * 16384 * K / 4 * 3 * D * M
