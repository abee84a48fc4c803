"""What the optimised program communicates: how many all-reduces, of how many operands, in which loop."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from ladder_jax import decode, nn, train
from ladder_jax.config import Loop, Remat
from ladder_jax.decode import cache, weights
from ladder_jax.parallel.collectives import ENTER, LAUNCH
from tests import cases, covering

NUM_LAYERS = 4
# all-reduces a layer and direction
A_LAYER = {"standard": 2, "ladder": 2, "ladder-2": 2, "ladder-3": 2, "ladder-fresh": 2, "parallel": 1,
           "parallel-shared-norm": 1, "parallel-ladder": 1, "desync-2": 1, "no-communication": 0}  # fmt: skip
BACKWARD = covering.rows(A_LAYER, Loop, Remat)
HYBRIDS = [name for name in cases.TOPOLOGIES if name.startswith("hybrid")]


def all_reduces(text: str) -> list[tuple[str, str, int, bool]]:
    """(direction, computation, operands, over the tensor axis alone) of every sublayer's all-reduce."""
    found, computation = [], None
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = "entry" if line.startswith("ENTRY") else header[1]
        if not re.search(r" all-reduce(-start)?\(", line):
            continue
        names = re.search(r'op_name="([^"]*)"', line)
        direction = next((n for n in (LAUNCH, ENTER) if names and n in names[1]), None)
        if direction:
            operands = re.search(r"all-reduce(?:-start)?\(([^)]*)\)", line)[1].count("%")
            found.append((direction, computation, operands, "{'tensor'}" in line))
    return found


def forward(definition, loop):
    tokens = jax.ShapeDtypeStruct((4, 16), jnp.int32)
    return nn.compiled_logits(definition, loop_form=loop).lower(definition.abstract, tokens).compile().as_text()


def backward(definition, loop, remat):
    tokens = jax.ShapeDtypeStruct(cases.tokens().shape, jnp.int32)  # as in test_numerics, which compiles most of these
    step = jax.jit(train.loss_and_gradients(definition, loop=loop, remat=remat))
    return step.lower(definition.abstract, tokens).compile().as_text()


def check_one_operand_each(found):
    assert all(operands == 1 for _, _, operands, _ in found), "merged"
    assert all(tensor for *_, tensor in found), "over another axis"


@pytest.mark.parametrize("name", A_LAYER)
def test_forward_unrolled(name):
    found = all_reduces(forward(cases.define(name, data=2, tensor=4), Loop.UNROLLED))
    check_one_operand_each(found)
    assert len(found) == A_LAYER[name] * NUM_LAYERS


@pytest.mark.parametrize("name", A_LAYER)
def test_forward_scanned(name):
    found = all_reduces(forward(cases.define(name, data=2, tensor=4), Loop.SCAN))
    check_one_operand_each(found)
    inside = [c for _, c, _, _ in found if c != "entry"]
    assert len(inside) == A_LAYER[name] and len(set(inside)) <= 1
    assert len(found) - len(inside) <= 1


@pytest.mark.parametrize("loop", Loop)
@pytest.mark.parametrize("name", ["standard", "ladder", "ladder-2", "ladder-fresh", "parallel-ladder"])
def test_prefill_of_a_later_chunk(name, loop):
    """The loop over key blocks, whose length is the device's to find, stands between the reductions and moves none."""
    definition = cases.define(name, data=2, tensor=4)
    caches = cache.abstract(definition, rows=4, capacity=64, loop=loop)
    tokens, start, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 16), (), (4,)))
    arguments = weights.abstract(definition, loop=loop), caches, tokens, start, lengths
    found = all_reduces(decode.extend(definition, loop=loop).compile(*arguments).as_text())
    check_one_operand_each(found)
    inside = [c for _, c, _, _ in found if c != "entry"]
    if loop is Loop.UNROLLED:
        assert len(found) == A_LAYER[name] * NUM_LAYERS and not inside
    else:
        assert len(inside) == A_LAYER[name] and len(set(inside)) == 1 and len(found) - len(inside) <= 1


@pytest.mark.parametrize("name, loop, remat", BACKWARD)
def test_forward_and_backward(name, loop, remat):
    found = all_reduces(backward(cases.define(name, data=2, tensor=4), loop, remat))
    check_one_operand_each(found)
    for direction in (LAUNCH, ENTER):
        inside = [c for d, c, _, _ in found if d == direction and c != "entry"]
        if loop is Loop.UNROLLED:
            assert len([d for d, *_ in found if d == direction]) == A_LAYER[name] * NUM_LAYERS
        else:
            assert len(inside) == A_LAYER[name] and len(set(inside)) <= 1
    assert loop is Loop.UNROLLED or len([c for _, c, _, _ in found if c == "entry"]) <= 1


@pytest.mark.parametrize("remat", [Remat.NONE, Remat.FULL])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_merge_nothing(name, remat):
    found = all_reduces(backward(cases.define(name, data=2, tensor=4), Loop.UNROLLED, remat))
    check_one_operand_each(found)
    joint = 2 if name == "hybrid-parallel-ladder" else 0  # two of its layers reduce once
    for direction in (LAUNCH, ENTER):
        assert len([d for d, *_ in found if d == direction]) == 2 * NUM_LAYERS - joint


def test_the_count_sees_a_merged_pair():
    """The control: the same Ladder without its chain is merged by the compiler, and the parser says so."""
    from jax.sharding import PartitionSpec as P

    from ladder_jax import parallel

    def naive(x, w):
        one = x + parallel.pvary(x, ("tensor",)) @ w  # stands for a sublayer; both read the same stream
        two = x + parallel.pvary(x, ("tensor",)) @ jnp.sin(w)
        with jax.named_scope(LAUNCH):
            return parallel.all_reduce(one, ("tensor",)) + parallel.all_reduce(jnp.cos(two), ("tensor",))

    mesh = parallel.make_mesh(tensor=8)
    local = jax.shard_map(naive, mesh=mesh, in_specs=(P(), P("tensor", None)), out_specs=P())
    shapes = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32)
    text = jax.jit(local).lower(*shapes).compile().as_text()
    assert [operands for _, _, operands, _ in all_reduces(text)] == [2]


def test_no_gradient_reduction_stands_in_the_layer_loop():
    """Data-parallel and norm-gain gradients are reduced once, after the loop."""
    text = backward(cases.define("ladder", data=2, tensor=4), Loop.SCAN, Remat.NONE)
    computation, outside = None, 0
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = "entry" if line.startswith("ENTRY") else header[1]
        if " all-reduce(" in line and "'data'" in line.split("replica_groups")[1].split("}")[0].split("{")[-1]:
            assert computation == "entry"
            outside += 1
    assert outside > 0


LOWERED = """
import hashlib, jax, jax.numpy as jnp
from ladder_jax import train
from ladder_jax.config import Loop
from tests import cases
definition = cases.define("ladder", data=2, tensor=4)
for loop in Loop:
    step = jax.jit(train.loss_and_gradients(definition, loop=loop))
    text = step.lower(definition.abstract, jax.ShapeDtypeStruct((4, 17), jnp.int32)).as_text()
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_every_process_makes_the_same_program():
    """Python orders sets differently in each; several processes that run one program must not differ."""
    root = pathlib.Path(__file__).parent.parent
    said = {
        subprocess.run(
            [sys.executable, "-c", LOWERED], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True, timeout=300,
        ).stdout
        for seed in "123"
    }  # fmt: skip
    assert len(said) == 1 and len(said.pop().split()) == 2
