"""Every topology, mesh and loop form against the dense float64 reference: values, gradients, and
what communicates.
"""

import itertools

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ladder_jax import nn, train
from ladder_jax.config import Biases, Loop, Remat, RopeScaling
from ladder_jax.parallel.compiled import LEVEL, initializer_options
from ladder_jax.scopes import ENTER, LAUNCH
from tests import cases, communication, compilations, covering, reference
from tests.together import together

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
        # Programs that communicate are counted, too: of each recurrence in either loop, with every
        # recomputation.
        *covering.array(
            cases.RECURRENCES, MESHES, Loop, Remat, pairs=[(0, 2), (2, 3)], even=[1, 3]
        ),
        *covering.array(cases.OTHERS, MESHES, Loop, Remat, pairs=[(1, 2)], even=[2, 3]),
        ("ladder-2", ONE_DEVICE, Loop.UNROLLED, Remat.NONE),  # emulated ranks have a scan
    ],
)


def of_parameters(definition, function):
    """A function to trace, and what it takes."""
    return function, (cases.placed(definition), cases.tokens())


def make_logits(name, tensor, loop):
    definition = cases.define(name, tensor=tensor)
    return of_parameters(definition, nn.compiled_logits(definition, loop=loop))


found_logits = together(make_logits, FORWARD)


@pytest.mark.parametrize("name, tensor, loop", FORWARD)
def test_forward(name, tensor, loop):
    """The logits; and that the program has each topology's all-reduces, one by one."""
    found, text = found_logits(name, tensor, loop)
    assert cases.error(found, cases.dense_logits(name, tensor)) < cases.bound(cases.model(name))
    if tensor > 1:
        communication.check(text, name=name, loop=loop)


def make_gradients(name, mesh, loop, remat):
    definition = cases.define(name, data=mesh[0], tensor=mesh[1])
    return of_parameters(definition, train.loss_and_gradients(definition, loop=loop, remat=remat))


found_gradients = together(make_gradients, GRADIENTS)


@pytest.mark.parametrize("name, mesh, loop, remat", GRADIENTS)
def test_gradients(name, mesh, loop, remat):
    """Loss and gradients; and that the program has each topology's all-reduces in both directions,
    one by one.
    """
    found, text = found_gradients(name, mesh, loop, remat)
    cases.assert_close(
        found, cases.dense_gradients(name, mesh[1]), definition=cases.define(name, tensor=mesh[1])
    )
    if mesh != ONE_DEVICE:
        communication.check(text, name=name, loop=loop, directions=(LAUNCH, ENTER))


EMULATED = covering.marked(
    [(name,) for name in cases.DEPEND_ON_RANKS],
    # all ranks' sums a step late, and none for two steps
    chosen=[("ladder-fresh",), ("desync-3",)],
)


def emulated(name):
    """Fewer ranks than key/value heads, and as many."""
    return 2 if name == "desync-3" else 4


def make_emulated(name):
    definition = cases.define(name, tensor=1, ranks=emulated(name))
    parts = (
        nn.compiled_logits(definition, loop=Loop.UNROLLED),
        train.loss_and_gradients(definition, loop=Loop.SCAN),
    )
    return of_parameters(definition, lambda *arguments: [part(*arguments) for part in parts])


found_emulated = together(make_emulated, EMULATED)


@pytest.mark.parametrize("name", EMULATED)
def test_one_device_emulates_the_ranks(name):
    ranks = emulated(name)
    definition = cases.define(name, tensor=1, ranks=ranks)
    (logits, gradients), _ = found_emulated(name)
    limit = cases.bound(definition.config)
    assert cases.error(logits, cases.dense_logits(name, ranks)) < limit
    assert cases.error(logits, cases.dense_logits(name, 6 - ranks)) > 100 * limit
    cases.assert_close(gradients, cases.dense_gradients(name, ranks), definition=definition)


@pytest.mark.parametrize("name", cases.TOPOLOGIES)
def test_only_parallel_shared_norm_has_one_norm_a_layer(name):
    """The reference takes it from the parameters."""
    assert ("mlp_norm" in cases.define(name).abstract["layers"]) == (name != "parallel-shared-norm")


def test_the_bound_tells_topologies_apart():
    """Every two different topologies differ by far more than the bound: a wrong one would be
    noticed.
    """
    limit = cases.bound(cases.model())
    # other parameters
    names = [name for name in cases.TOPOLOGIES if name != "parallel-shared-norm"]
    for index, a in enumerate(names):
        for b in names[:index]:
            assert cases.error(cases.dense_logits(a, 4), cases.dense_logits(b, 4)) > 100 * limit, (
                a,
                b,
            )


FAMILY = {  # several in a program, each of another part of the model
    "tied, 1-kv-head, rope-scaling": dict(
        tie_embeddings=True,
        num_kv_heads=1,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=8.0, original_context=16),
    ),
    "qkv-biases, 8-kv-heads": dict(biases=Biases.QKV, num_kv_heads=8),
    "biases, vocabulary-of-1000, qk-norm, head-of-6": dict(
        biases=Biases.ALL, vocab_size=1000, qk_norm=True, num_kv_heads=2, head_dim=6
    ),
    "qk-norm-of-all-heads": dict(qk_norm="all-heads", num_kv_heads=2, biases=Biases.ALL),
    "2-kv-heads, biases": dict(num_kv_heads=2, biases=Biases.ALL),
}


MEMBERS = covering.marked(
    [
        *itertools.product(["ladder"], FAMILY, [8, 1]),
        *itertools.product(["ladder-fresh", "desync-2"], ["2-kv-heads, biases"], [8]),
    ],
    chosen=[
        *(("ladder", member, 8) for member in FAMILY if member != "2-kv-heads, biases"),
        # ranks that share a head have inputs of their own
        ("ladder-fresh", "2-kv-heads, biases", 8),
    ],
)


def make_member(name, member, tensor):
    definition = cases.define(name, tensor=tensor, num_layers=2, **FAMILY[member])
    return of_parameters(definition, train.loss_and_gradients(definition, loop=Loop.SCAN))


found_member = together(make_member, MEMBERS)


@pytest.mark.parametrize("name, member, tensor", MEMBERS)
def test_llama_family(name, member, tensor):
    """Everything that members of the family differ in, over more ranks than key/value heads too."""
    found, _ = found_member(name, member, tensor)
    changes = dict(num_layers=2, **FAMILY[member])
    expected = cases.dense_gradients(name, tensor, **changes)
    definition = cases.define(name, tensor=tensor, **changes)
    cases.assert_close(found, expected, definition=definition)


def test_initial_values_are_the_same_everywhere():
    meshes = [dict(), dict(data=2, tensor=4), dict(tensor=8)]
    values = [nn.initialize(cases.define("ladder", **mesh), seed=7) for mesh in meshes]
    for other in values[1:]:
        for a, b in zip(jax.tree.leaves(values[0]), jax.tree.leaves(other), strict=True):
            assert_array_equal(a[:251], b[:251])  # without the vocabulary's padding
    assert not np.array_equal(values[0]["embedding"]["table"], values[0]["head"]["table"])
    with compilations.counted() as compiled:
        again = nn.initialize(cases.define("ladder"), seed=8)
    assert not compiled  # one program for all seeds
    assert not np.array_equal(again["layers"]["mlp"]["up"], values[0]["layers"]["mlp"]["up"])
    first, second, *_ = values[0]["layers"]["mlp"]["up"]
    assert not np.array_equal(first, second)  # their deviations are in test_pretrain.py


def test_a_key_may_be_anywhere():
    """On another device than the model's, or on a mesh that is set."""
    definition = cases.define("ladder")
    expected = nn.initialize(definition, seed=7)
    key = jax.device_put(nn.parameter.root_key(7), jax.devices()[5])
    with jax.set_mesh(jax.make_mesh((8,), ("all",))):
        of_mesh = nn.initialize(definition, seed=7)
    for found in (nn.initialize(definition, key=key), of_mesh):
        jax.tree.map(assert_array_equal, found, expected)


def test_the_compilers_level_changes_no_initial_value(monkeypatch):
    """The tests' own, of XLA_FLAGS, and that of a user who sets none."""
    definition = cases.define("ladder", num_layers=1)
    expected, mesh = nn.initialize(definition, seed=7), definition.layout.mesh
    assert initializer_options(mesh) == {}
    monkeypatch.delenv("XLA_FLAGS")
    assert initializer_options(mesh) == {LEVEL: 2}
    initial = nn.parameter.initializer(
        definition.modules, layout=definition.layout, config=definition.config
    )
    found = initial(nn.parameter.root_key(7))
    jax.tree.map(assert_array_equal, found, expected)


@pytest.mark.parametrize(
    "name, mesh, settings",
    [
        ("ladder", (2, 4), dict(sequence_parallel=True, remat=Remat.FULL)),
        ("ladder-2", (1, 4), dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS)),
    ],
)
def test_second_derivatives(name, mesh, settings):
    """The Hessian times the parameters: the gradient's own derivative, forward over reverse."""
    definition = cases.define(name, data=mesh[0], tensor=mesh[1], num_layers=2)
    params = cases.parameters(definition)
    tokens = cases.tokens((4, 9))
    compute = train.loss_and_gradients(definition, **settings)

    def along(params, tokens):
        return jax.jvp(lambda params: compute(params, tokens), (params,), (params,))[1]

    def dense(factor):
        scaled = jax.tree.map(lambda a: factor * np.float64(a), params)
        shape = cases.shape(name, definition.config, ranks=1)
        return reference.evaluate(reference.loss, scaled, tokens, shape, gradient=True)

    found = jax.jit(along)(cases.place(params, definition), tokens)
    step = 1e-5
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), dense(1 + step), dense(1 - step))
    cases.assert_close(found, expected, definition=definition, passes=4)
