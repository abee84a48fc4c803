"""What is compiled beside the programs of test_numerics, which counts those' all-reduces: a
chunk's, and controls.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import decode, parallel, train
from ladder_jax.config import Loop, Remat
from ladder_jax.decode import steps, weights
from ladder_jax.scopes import LAUNCH
from tests import cases, communication, compilations, covering
from tests.changed import ROOT

KINDS = "ladder", "standard", "ladder-2", "ladder-fresh", "parallel-ladder"


@pytest.mark.parametrize("name, loop", covering.rows(KINDS, Loop, pairs=[], even=[1]))
def test_prefill_of_a_later_chunk(name, loop):
    """The loop over key blocks, whose length is the device's to find, stands between the reductions
    and moves none.
    """
    definition = cases.define(name, data=2, tensor=4)
    caches = steps.abstract_cache(definition, rows=4, capacity=64, loop=loop)
    tokens, start, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 16), (), (4,))
    )
    arguments = weights.abstract(definition, loop=loop), caches, tokens, start, lengths
    text = decode.extend(definition, loop=loop).compile(*arguments).as_text()
    communication.check(text, name=name, loop=loop)


def test_emulated_ranks_share_a_head():
    """Of two heads on four ranks, each stands on two."""
    layout = cases.define("ladder-fresh", ranks=4, num_kv_heads=2).layout
    heads = jnp.arange(12.0).reshape(2, 2, 3)
    each = parallel.over_ranks(lambda x: x, layout=layout, in_dims=("BKH",), out_dims="BNH")
    assert jnp.array_equal(each(heads), jnp.repeat(heads, 2, axis=1))


def test_the_count_sees_a_merged_pair():
    """The control: the same Ladder without its chain is merged by the compiler, and the parser says
    so.
    """
    axes = ("tensor",)

    def naive(x, w):
        x = parallel.pvary(x, axes)  # a stream that two sublayers read
        with jax.named_scope(LAUNCH):
            return parallel.all_reduce(x @ w, axes) + parallel.all_reduce(x @ jnp.sin(w), axes)

    mesh = parallel.make_mesh(tensor=8)
    local = jax.shard_map(naive, mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=P())
    text = jax.jit(local).lower(jnp.ones((16, 8)), jnp.ones((8, 64))).compile().as_text()
    assert [operands for _, _, operands, _ in communication.all_reduces(text)] == [2]


def test_no_gradient_reduction_stands_in_the_layer_loop():
    """Data-parallel and norm-gain gradients are reduced once, after the loop."""
    definition = cases.define("ladder", num_layers=2, data=2, tensor=4)
    step = jax.jit(train.loss_and_gradients(definition, loop=Loop.SCAN))
    tokens = jax.ShapeDtypeStruct((4, 10), jnp.int32)
    text = step.lower(definition.abstract, tokens).compile().as_text()
    axes = lambda line: line.split("replica_groups")[1].split("}")[0].split("{")[-1]
    places = {place for place, line in communication.lines(text) if "'data'" in axes(line)}
    assert places == {"entry"}


def lowered():
    definition = cases.define("ladder", num_layers=2, data=2, tensor=4)
    tokens = jax.ShapeDtypeStruct((4, 17), jnp.int32)
    steps = (jax.jit(train.loss_and_gradients(definition, loop=loop)) for loop in Loop)
    return [compilations.digest(step, (definition.abstract, tokens)) for step in steps]


def test_every_process_makes_the_same_program(run_python):
    """Python orders sets differently in each; several processes that run one program must not
    differ.
    """
    code = "from tests import test_program; print(*test_program.lowered())"
    done = run_python("-c", code, cwd=ROOT, check_status=0, PYTHONHASHSEED="1")
    assert done.stdout.split() == lowered()  # of a random seed, as Python's own


MESHES = {"fsdp x tensor": dict(fsdp=2, tensor=4), "one device": {}}


@pytest.mark.parametrize("name, mesh", covering.rows(KINDS[:2], MESHES, pairs=[]))
def test_what_the_backward_pass_multiplies_again(name, mesh):
    """Of a layer: query, key, value, gate, up and attention's two products; with the matmuls kept,
    those two alone.
    """
    definition = cases.define(name, num_layers=2, **MESHES[mesh])
    tokens = jax.ShapeDtypeStruct((4, 13), jnp.int32)

    def matmuls(remat):
        step = train.loss_and_gradients(definition, loop=Loop.UNROLLED, remat=remat)
        return jax.jit(step).lower(definition.abstract, tokens).as_text().count("dot_general")

    plain = matmuls(Remat.NONE)
    layers = definition.config.num_layers
    # Partial sums, which the loop over fsdp ties to weights.
    tied = layers - 1 if MESHES[mesh] and name == "ladder" else 0
    assert matmuls(Remat.FULL) == plain + 7 * layers + tied
    assert matmuls(Remat.SAVE_MATMULS) == plain + 2 * layers
