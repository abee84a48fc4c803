"""Grouped matmuls as the compilers for GPUs and TPUs make them: kernels, which read the experts
that rows chose.

Two layers of Qwen3-30B-A3B over 8 devices, so that each holds 16 of 128 experts.
"""

import base64
import itertools
import os
import re
import subprocess
import sys

import pytest

from ladder_jax.nn.grouped import VARIABLE
from ladder_jax.schedule import hlo, targets
from ladder_jax.schedule.cost import Costs
from tests.covering import full

pytestmark = pytest.mark.audit

PROGRAM = """
import sys

import jax.numpy as jnp

from ladder_jax import config, decode, nn, schedule, train
from ladder_jax.config import Loop, Quantize, TrainConfig
from ladder_jax.decode import steps

target, phase, quantize = sys.argv[1:]
model = config.preset("qwen3-30b-a3b", num_layers=2, residual="ladder")
definition = nn.define(model, mesh=schedule.make_mesh(target))
if phase == "train":
    settings = TrainConfig(batch=4, sequence=512, loop=Loop.SCAN)
    step = train.train_step(definition, config=settings)
    arguments = train.abstract_state(definition, config=settings), train.abstract_batch(definition, config=settings)
else:
    stored = dict(loop=Loop.UNROLLED, quantize=Quantize(quantize))
    step = decode.decode_many(definition, choice=decode.Choice.GREEDY, **stored)
    arguments = steps.abstract(definition, rows=1, positions=2048, **stored)
print(step.compile(*arguments).as_text())
"""


GPUS = "h100", "b200"


def compiled(target, phase, *, quantize="none", **environment):
    """The program's text and its parsed form."""
    if target.startswith(GPUS):
        environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    environment |= {**targets.ENVIRONMENT, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", PROGRAM, target, phase, quantize]
    environment = {**os.environ, **environment}
    text = subprocess.check_output(command, env=environment, text=True, timeout=600)
    return text, hlo.parse(text)


def kernels(program):
    """The grouped matmuls of both kinds."""
    names = re.compile(r"/grouped_matmul(_over_rows)?/pallas_call|/ragged-dot-none")
    return [
        one
        for one in program.instructions
        if one.opcode == "custom-call" and names.search(one.op_name)
    ]


def is_matrices(instruction):
    """Whether all experts that a rank holds are of its result."""
    matrices = [one.dims for one in instruction.arrays if len(one.dims) == 3]
    return any(
        experts == 16 and rows * columns >= 768 * 2048 for experts, rows, columns in matrices
    )


def expert_flops(program):
    """Of the dots and convolutions in the MLPs, but the routers'; a loop's body once."""
    costs = Costs(program)
    products = (one for one in program.instructions if one.opcode in ("dot", "convolution"))
    of_experts = (
        one for one in products if re.search(r"\bmlp\b", one.op_name) and "DC" not in one.op_name
    )
    return sum(costs.flops_of([one]).total() for one in of_experts)


@pytest.mark.parametrize("target", ["h100:8", full("b200:8")])
def test_no_gpu_multiplies_every_row_with_every_expert(target):
    """A training step: kernels, and no product beside them. With the way back, 16 times the
    products of all rows.
    """
    _, program = compiled(target, "train")
    names = sorted(one.op_name.split("/")[-2] for one in kernels(program))
    assert names == ["grouped_matmul"] * 6 + ["grouped_matmul_over_rows"] * 3
    assert expert_flops(program) == 0
    _, program = compiled(target, "train", **{VARIABLE: "xla"})
    rows = 4 * 512 * 8
    held = 128 // 8
    assert not kernels(program)
    assert expert_flops(program) == 9 * held * 2 * rows * 2048 * 768


FULL = [("b200:8", "int8"), ("v5e:2x4", "int8"), ("v6e:2x4", "int8"), ("tpu7x:2x2x1", "none")]
DECODE = [
    *itertools.product(("h100:8", "v5p:2x2x2"), ("none", "int8")),
    *(full(*case) for case in FULL),
]


@pytest.mark.parametrize("target, quantize", DECODE)
def test_a_decode_step_reads_the_experts_that_its_rows_chose(target, quantize):
    """The matrices of all experts go into kernels, nothing else reads them, and a kernel reads
    those with rows: on GPUs by its tiles (tests/test_grouped.py), on TPUs by a grid as long as
    there are tiles with rows. On v5e and v6e XLA copies some matrices whole into vector memory,
    ahead of their kernels.
    """
    text, program = compiled(target, "decode", quantize=quantize)
    passing = {"parameter", "get-tuple-element", "tuple", "while", "bitcast"}
    copies = [
        one.name for one in program.instructions if is_matrices(one) and one.opcode not in passing
    ]
    assert not copies or target.startswith(("v5e", "v6e"))
    found = kernels(program)
    kind = {"none": "bf16", "int8": "s8"}[quantize]
    for kernel in found:
        assert [one.arrays[0].kind for one in kernel.operands if is_matrices(one)] == [kind]
    assert len(found) == 6  # gate, up and down of two layers
    if target.startswith(GPUS):
        return
    encoded = re.findall(r'"body":"([^"]*)"', text)
    decoded = [base64.b64decode(body).decode(errors="replace") for body in encoded]
    bodies = [body for body in decoded if "@rhs_transform_indices" in body]
    assert bodies
    for body in bodies:
        bounds = re.search(r"iteration_bounds = array<i64: ([-\d, ]+)>", body)[1].split(", ")
        assert int(bounds[1]) == -(2**63)  # known when it runs: the metadata's number of tiles
        matrix = re.findall(r"window_bounds = array<i64: ([\d, ]+)>", body)[1]
        assert matrix.startswith("1, ")  # of one expert, which a table names by the tile
        assert (
            "memref.load %arg4"
            in body[body.index("@rhs_transform_indices(%arg0") :].split("return %1")[0]
        )


@pytest.mark.full
def test_tpu7x_converts_all_experts_of_8_bits():
    """What docs/guides/experts.md says of it; where this fails, a new compiler has done away with
    it.
    """
    _, program = compiled("tpu7x:2x2x1", "decode", quantize="int8")
    made = [
        one
        for one in program.instructions
        if one.arrays and one.arrays[0] == hlo.Array("bf16", (16, 768, 2048))
    ]
    assert any(one.opcode in ("convert", "fusion") for one in made)
