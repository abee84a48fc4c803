"""Every topology, mesh and loop form against the dense float64 reference: values, gradients, and what communicates."""

import functools
import itertools

import jax
import numpy as np
import pytest

from ladder_jax import nn, train
from ladder_jax.config import Biases, Loop, Remat, RopeScaling
from ladder_jax.scopes import ENTER, LAUNCH
from tests import cases, communication, covering, reference

FORWARD = covering.marked(
    itertools.product(cases.TOPOLOGIES, (1, 2, 4, 8), Loop),
    chosen=covering.array(cases.TOPOLOGIES, (1, 2, 4, 8), Loop, pairs=[(1, 2)], even=[1, 2]),
)
ONE_DEVICE, MESHES = (1, 1), ((1, 4), (2, 4))  # data x tensor
GRADIENTS = covering.marked(
    [
        *itertools.product(cases.TOPOLOGIES, [ONE_DEVICE, *MESHES], Loop, [Remat.NONE]),
        *itertools.product(cases.TOPOLOGIES, [(2, 4)], Loop, Remat),
    ],
    chosen=[
        # Programs that communicate are counted, too: of each recurrence, with every recomputation.
        *covering.array(cases.RECURRENCES, MESHES, Loop, Remat, pairs=[(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]),
        *covering.array(cases.RECURRENCES, [ONE_DEVICE], Loop, [Remat.NONE], pairs=[(1, 2)]),
        *covering.array(cases.OTHERS, MESHES, Loop, Remat, pairs=[(0, 1), (0, 2), (1, 2), (2, 3)], even=[3]),
    ],
)


def logits(definition, *, loop):
    """The logits, and the program's text."""
    params = cases.place(cases.parameters(definition), definition)
    program = nn.compiled_logits(definition, loop=loop).lower(params, cases.tokens()).compile()
    return np.asarray(program(params, cases.tokens())), program.as_text()


def check_gradients(definition, *, loop, expected, remat=Remat.NONE) -> str:
    """The program's text."""
    params = cases.place(cases.parameters(definition), definition)
    step = jax.jit(train.loss_and_gradients(definition, loop=loop, remat=remat))
    program = step.lower(params, cases.tokens()).compile()
    loss, grads = program(params, cases.tokens())
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected[0]) < limit
    errors = jax.tree.map(cases.error_but_for_padding, grads, expected[1])
    assert max(jax.tree.leaves(errors)) < limit, errors
    return program.as_text()


@pytest.mark.parametrize("name, tensor, loop", FORWARD)
def test_forward(name, tensor, loop):
    """The logits; and that the program has each topology's all-reduces, one by one."""
    definition = cases.define(name, tensor=tensor)
    found, text = logits(definition, loop=loop)
    assert cases.error(found, cases.dense_logits(name, tensor)) < cases.bound(definition.config)
    if tensor > 1:
        communication.check(text, name=name, loop=loop)


@pytest.mark.parametrize("name, mesh, loop, remat", GRADIENTS)
def test_gradients(name, mesh, loop, remat):
    """Loss and gradients; and that the program has each topology's all-reduces in both directions, one by one."""
    definition = cases.define(name, data=mesh[0], tensor=mesh[1])
    text = check_gradients(definition, loop=loop, remat=remat, expected=cases.dense_gradients(name, mesh[1]))
    if mesh != ONE_DEVICE:
        communication.check(text, name=name, loop=loop, directions=(LAUNCH, ENTER))


EMULATED = "ladder-fresh", "desync-3"  # in `make test`: all ranks' sums a step late, and none for two steps


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EMULATED else pytest.mark.full) for n in cases.DEPEND_ON_RANKS]
)
def test_one_device_emulates_the_ranks(name):
    definition = cases.define(name, tensor=1, ranks=4)
    limit = cases.bound(definition.config)
    for loop in Loop:
        found, _ = logits(definition, loop=loop)
        assert cases.error(found, cases.dense_logits(name, 4)) < limit
    assert cases.error(found, cases.dense_logits(name, 2)) > 100 * limit
    check_gradients(definition, loop=Loop.SCAN, expected=cases.dense_gradients(name, 4))


@pytest.mark.parametrize("name", cases.TOPOLOGIES)
def test_only_parallel_shared_norm_has_one_norm_a_layer(name):
    """The reference takes it from the parameters."""
    assert ("mlp_norm" in cases.define(name).abstract["layers"]) == (name != "parallel-shared-norm")


def test_the_bound_tells_topologies_apart():
    """Every two different topologies differ by far more than the bound: a wrong one would be noticed."""
    limit = cases.bound(cases.model())
    names = [name for name in cases.TOPOLOGIES if name != "parallel-shared-norm"]  # other parameters
    for index, a in enumerate(names):
        for b in names[:index]:
            assert cases.error(cases.dense_logits(a, 4), cases.dense_logits(b, 4)) > 100 * limit, (a, b)


FAMILY = {  # several in a program, each of another part of the model
    "tied, 1-kv-head, rope-scaling": dict(
        tie_embeddings=True,
        num_kv_heads=1,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, original_context=16),
    ),
    "qkv-biases, 8-kv-heads": dict(biases=Biases.QKV, num_kv_heads=8),
    "biases, vocabulary-of-1000": dict(biases=Biases.ALL, vocab_size=1000),
    "qk-norm, head-of-6": dict(qk_norm=True, num_kv_heads=2, head_dim=6),
    "qk-norm-of-all-heads": dict(qk_norm="all-heads", num_kv_heads=2, biases=Biases.ALL),
}


@pytest.mark.parametrize("member, tensor", covering.rows(FAMILY, [8, 1], pairs=[]))
def test_llama_family(member, tensor):
    """Everything that members of the family differ in, over more ranks than key/value heads too."""
    definition = cases.define("ladder", tensor=tensor, **FAMILY[member])
    check_gradients(definition, loop=Loop.SCAN, expected=_family(member))


@functools.cache
def _family(member: str):
    definition = cases.define("ladder", **FAMILY[member])
    shape = cases.shape("ladder", definition.config, ranks=1)
    return reference.evaluate(reference.loss, cases.parameters(definition), cases.tokens(), shape, gradient=True)


@pytest.mark.parametrize("name", ["ladder-fresh", "desync-2"])
def test_ranks_that_share_a_head_have_their_own_inputs(name):
    definition = cases.define(name, tensor=8, num_kv_heads=2, biases=Biases.ALL)
    shape = cases.shape(name, definition.config, ranks=8)
    params = cases.parameters(definition)
    expected = reference.evaluate(reference.loss, params, cases.tokens(), shape, gradient=True)
    check_gradients(definition, loop=Loop.SCAN, expected=expected)


def test_initial_values_are_the_same_everywhere():
    meshes = [dict(), dict(tensor=4), dict(data=2, tensor=4), dict(tensor=8)]
    values = [nn.initialize(cases.define("ladder", **mesh), seed=7) for mesh in meshes]
    for other in values[1:]:
        for a, b in zip(jax.tree.leaves(values[0]), jax.tree.leaves(other), strict=True):
            rows = 251 if a.ndim == 2 and a.shape[0] >= 251 else a.shape[0]  # without the padding
            np.testing.assert_array_equal(np.asarray(a)[:rows], np.asarray(b)[:rows])
    assert not np.array_equal(values[0]["embedding"]["table"], values[0]["head"]["table"])
    again = nn.initialize(cases.define("ladder"), seed=8)
    assert not np.array_equal(again["layers"]["mlp"]["up"], values[0]["layers"]["mlp"]["up"])
    layers = np.asarray(values[0]["layers"]["mlp"]["up"])
    assert not np.array_equal(layers[0], layers[1])
    assert abs(layers.std() / 0.02 - 1) < 0.05
    assert abs(np.asarray(values[0]["layers"]["mlp"]["down"]).std() / (0.02 / np.sqrt(8)) - 1) < 0.05


def test_bfloat16_stays_close_to_float32():
    """Sums are kept in float32, so only what passes between operations is rounded: 4 values a stage."""
    from ladder_jax.config import Dtype

    definition = cases.define("ladder", tensor=4, dtype=Dtype.BFLOAT16)
    limit = 4 * (2 * definition.config.num_layers + 2) * 2.0**-9
    assert limit > cases.error(logits(definition, loop=Loop.SCAN)[0], cases.dense_logits("ladder", 4)) > 2.0**-10
