"""Every topology, mesh and loop form against the dense float64 reference: values and gradients."""

import functools
import itertools

import jax
import numpy as np
import pytest

from ladder_jax import nn, train
from ladder_jax.config import Biases, Loop, Remat, RopeScaling
from tests import cases, covering, reference

MESHES = ((1, 1), (1, 4), (2, 4))  # data x tensor
FORWARD = covering.rows(cases.TOPOLOGIES, (1, 2, 4, 8), Loop, pairs=[(0, 1), (0, 2), (1, 2)])
RECOMPUTED = ("standard", "ladder", "ladder-2", "ladder-fresh", "desync-2")
GRADIENTS = covering.marked(
    [
        *itertools.product(cases.TOPOLOGIES, MESHES, Loop, [Remat.NONE]),
        *itertools.product(RECOMPUTED, [(2, 4)], Loop, [Remat.FULL, Remat.SAVE_MATMULS]),
    ],
    chosen=covering.array(cases.TOPOLOGIES, MESHES, Loop, Remat, pairs=[(0, 1), (0, 2), (1, 2), (0, 3)]),
)


def dense_ranks(name: str, ranks: int) -> int:
    """One reference serves all meshes where the function does not depend on the ranks."""
    return ranks if cases.TOPOLOGIES[name][2] in ("fresh", "desync", "none") else 1


def dense_logits(name: str, ranks: int) -> np.ndarray:
    return _dense(name, dense_ranks(name, ranks), reference.logits)


def dense_gradients(name: str, ranks: int):
    return _dense(name, dense_ranks(name, ranks), reference.loss)


@functools.cache
def _dense(name: str, ranks: int, function):
    definition = cases.define(name, tensor=ranks)
    shape = cases.shape(name, definition.config, ranks=ranks)
    params = cases.parameters(definition)
    return reference.evaluate(function, params, cases.tokens(), shape, gradient=function is reference.loss)


def logits(definition, *, loop, params=None):
    params = cases.parameters(definition) if params is None else params
    return np.asarray(nn.compiled_logits(definition, loop_form=loop)(cases.place(params, definition), cases.tokens()))


def check_gradients(definition, *, loop, expected, remat=Remat.NONE):
    params = cases.place(cases.parameters(definition), definition)
    compute = jax.jit(train.loss_and_gradients(definition, loop=loop, remat=remat))
    loss, grads = compute(params, cases.tokens())
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(loss, expected[0]) < limit
    errors = jax.tree.map(cases.error_but_for_padding, grads, expected[1])
    assert max(jax.tree.leaves(errors)) < limit, errors


@pytest.mark.parametrize("name, tensor, loop", FORWARD)
def test_forward(name, tensor, loop):
    definition = cases.define(name, tensor=tensor)
    assert cases.error(logits(definition, loop=loop), dense_logits(name, tensor)) < cases.bound(definition.config)


@pytest.mark.parametrize("name, mesh, loop, remat", GRADIENTS)
def test_gradients(name, mesh, loop, remat):
    definition = cases.define(name, data=mesh[0], tensor=mesh[1])
    check_gradients(definition, loop=loop, remat=remat, expected=dense_gradients(name, mesh[1]))


@pytest.mark.parametrize("name", cases.DEPEND_ON_RANKS)
def test_one_device_emulates_the_ranks(name):
    definition = cases.define(name, tensor=1, ranks=4)
    limit = cases.bound(definition.config)
    for loop in Loop:
        assert cases.error(logits(definition, loop=loop), dense_logits(name, 4)) < limit
    assert cases.error(logits(definition, loop=Loop.SCAN), dense_logits(name, 2)) > 100 * limit
    check_gradients(definition, loop=Loop.SCAN, expected=dense_gradients(name, 4))


def test_the_bound_tells_topologies_apart():
    """Every two different topologies differ by far more than the bound: a wrong one would be noticed."""
    limit = cases.bound(cases.model())
    names = [name for name in cases.TOPOLOGIES if name != "parallel-shared-norm"]  # other parameters
    for index, a in enumerate(names):
        for b in names[:index]:
            assert cases.error(dense_logits(a, 4), dense_logits(b, 4)) > 100 * limit, (a, b)


@pytest.mark.parametrize(
    "changes",
    [
        dict(tie_embeddings=True),
        dict(biases=Biases.QKV),
        dict(biases=Biases.ALL),
        dict(qk_norm=True),
        dict(num_kv_heads=1),
        dict(num_kv_heads=8),
        dict(num_kv_heads=2, head_dim=6),
        dict(rope_theta=500_000.0, rope_scaling=RopeScaling(factor=8.0, original_context=16)),
        dict(vocab_size=1000),
    ],
    ids=str,
)
@pytest.mark.parametrize("tensor", [1, 8])
def test_llama_family(changes, tensor):
    """Everything that members of the family differ in, over more ranks than key/value heads too."""
    definition = cases.define("ladder", tensor=tensor, **changes)
    check_gradients(definition, loop=Loop.SCAN, expected=_family(tuple(changes.items())))


@functools.cache
def _family(changes: tuple):
    definition = cases.define("ladder", **dict(changes))
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
    assert limit > cases.error(logits(definition, loop=Loop.SCAN), dense_logits("ladder", 4)) > 2.0**-10
