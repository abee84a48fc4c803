"""The emulated wire of experiments/one_gpu, compiled for an H100: is it beside compute where it should be?"""

import os
import re
import subprocess
import sys

import pytest

from ladder_jax.schedule import hlo, targets

pytestmark = [pytest.mark.audit, pytest.mark.full]

LAYERS = 4
PROGRAM = """
import sys

from experiments.one_gpu.wire import host_wire
from ladder_jax import decode, nn, schedule
from ladder_jax.bench import request as requests
from ladder_jax.config import Loop
from ladder_jax.decode import steps

name, layers = sys.argv[1], int(sys.argv[2])
config = requests.make(model="llama-3-70b", residual=name, share=8, layers=layers).config(name)
definition = nn.define(config, mesh=schedule.make_mesh("h100:8", tensor=1))
with host_wire():
    loop = decode.decode_many(definition, count=3, choice=decode.Choice.GREEDY)
    print(loop.compile(*steps.abstract(definition, rows=16, positions=2048, loop=Loop.UNROLLED)).as_text())
"""


def windows(name):
    """For the copies to the host, and for those back: how many matrix products are issued between start and done."""
    command = [sys.executable, "-c", PROGRAM, name, str(LAYERS)]
    done = subprocess.run(
        command, env={**os.environ, **targets.ENVIRONMENT}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    program = hlo.parse(done.stdout)
    body = max(program.computations.values(), key=lambda c: sum(i.opcode == "copy-start" for i in c.instructions))
    place = {instruction: index for index, instruction in enumerate(body.instructions)}
    there, back = [], []
    for end in body.instructions:
        if end.opcode != "copy-done":
            continue
        [start] = end.operands
        into, out_of = re.findall(r"\{[^}]*\}", start.shape)[:2]
        between = body.instructions[place[start] : place[end]]
        products = sum(map(has_product, between))
        if "S(5)" in into:  # the host's memory
            there.append(products)
        elif "S(5)" in out_of:
            back.append(products)
    return there, back


def has_product(instruction):
    inside = (one for called in instruction.calls for one in called.instructions)
    product = instruction.opcode == "dot" or "gemm" in instruction.attribute("custom_call_target")
    return product or any(map(has_product, inside))


@pytest.mark.skipif(bool(targets.not_installed(targets.parse("h100:8"))), reason="no CUDA plugin")
@pytest.mark.parametrize("name, hidden", [("ladder", 2 * LAYERS - 1), ("standard", 0), ("parallel", 0)])
def test_what_comes_back_is_beside_a_sublayer(name, hidden):
    """The way there is not: XLA gives all of the sublayer to the second copy. Standard is the control."""
    there, back = windows(name)
    copies = LAYERS if name == "parallel" else 2 * LAYERS
    assert len(there) == len(back) == copies
    assert sum(count > 0 for count in back) == hidden and not any(there)
