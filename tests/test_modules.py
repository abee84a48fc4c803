"""The modules of `nn` as Flax modules: made with rngs, called alone on one device and inside
`jax.shard_map`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ladder_jax
from ladder_jax import nn, parallel, residual
from ladder_jax.config import Biases
from ladder_jax.nn.modules import LayerContext
from tests import cases, reference
from tests.refusals import refused

CONFIG = cases.model("ladder", num_layers=1, biases=Biases.ALL, qk_norm=True)
LIMIT = cases.bound(CONFIG)
X = np.random.default_rng(0).standard_normal((2, 6, CONFIG.d_model)).astype(np.float32)
SHAPE = cases.shape("ladder", CONFIG, ranks=1)


@pytest.mark.parametrize(
    "name, scopes", [("ladder", ("attention", "mlp")), ("parallel", ("joint", "joint"))]
)
def test_sublayers_are_named(name, scopes):
    """By which a schedule's report finds them."""
    mesh = parallel.make_mesh(tensor=2)
    config = cases.model(name, num_layers=1)
    params = cases.parameters(nn.define(config, mesh=mesh))
    model = ladder_jax.Transformer(config, mesh=mesh, params=params)
    lowered = (
        jax.jit(lambda tokens: model(tokens)).lower(cases.tokens((1, 4))).as_text(debug_info=True)
    )
    for scope, last in zip(scopes, ("BTNH,NHD->BTD", "BTF,FD->BTD")):
        assert f'"layer_0/{scope}/{last}/dot_general"' in lowered


def made(module, **settings):
    """With values other than zero for biases, which start there."""
    one = module(CONFIG, rngs=nnx.Rngs(0), **settings)
    rng = np.random.default_rng(1)
    nnx.update(
        one,
        jax.tree.map(
            lambda a: jnp.asarray(a + 0.3 * rng.standard_normal(a.shape), a.dtype), nnx.state(one)
        ),
    )
    return one


def float64(of):
    """`of` a module's parameters, by the reference, on one rank."""
    alone = lambda params, x, shape: of(params, x[None], shape)[0]
    return lambda module: reference.evaluate(
        alone, nnx.to_pure_dict(nnx.state(module)), X.astype(np.float64), SHAPE
    )


REFERENCE = {
    "attention": (nn.Attention, float64(reference.attention)),
    "mlp": (nn.MLP, float64(reference.mlp)),
    "norm": (nn.RMSNorm, float64(lambda p, x, shape: reference.rms(x, p["scale"], shape.eps))),
}


@pytest.mark.parametrize("module, expected", REFERENCE.values(), ids=REFERENCE)
def test_alone_on_one_device(module, expected):
    one = made(module)
    exact = expected(one)
    assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(nnx.state(one)))
    assert cases.error(one(X), exact) < LIMIT
    assert cases.error(nnx.jit(lambda module, x: module(x))(one, X), exact) < LIMIT


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_inside_shard_map_the_sum_of_partials_is_the_whole(name):
    """Forward and the gradient of every parameter, against the same module on one device."""
    module, expected = REFERENCE[name]
    one = made(module)
    graph, params = nnx.split(one)
    specs = nn.partition_specs(one)

    def local(params, x):
        first = jax.lax.axis_index("tensor") == 0
        return jax.lax.psum(
            nnx.merge(graph, params)(parallel.pvary(x, ("tensor",)), first_rank=first), "tensor"
        )

    mesh = parallel.make_mesh(tensor=4)
    on_ranks = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, P()), out_specs=P()))
    assert cases.error(on_ranks(params, X), expected(one)) < LIMIT
    loss = lambda run: lambda params: jnp.sum(jnp.sin(run(params)))
    split = jax.jit(jax.grad(loss(lambda params: on_ranks(params, X))))(params)
    whole = jax.jit(jax.grad(loss(lambda params: nnx.merge(graph, params)(X))))(params)
    for a, b in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        assert cases.error(a, b) < 2 * LIMIT


def test_an_embedding_alone():
    one, tokens = made(nn.Embedding), cases.tokens((2, 6))
    table = np.asarray(one.table[...], np.float64)
    assert cases.error(one(tokens), table[tokens]) == 0
    logits = np.asarray(one.logits(X))
    assert cases.error(logits[..., :251], X.astype(np.float64) @ table[:251].T) < LIMIT
    assert (logits[..., 251:] == -np.inf).all()
    assert (nn.Embedding(CONFIG, rngs=nnx.Rngs(0)).table[251:] == 0).all()


@pytest.mark.parametrize("name", ["standard", "ladder", "parallel"])
def test_a_layer_alone_is_the_model_of_one_layer(name):
    config = cases.model(name, num_layers=1)
    layer = nn.Layer(config, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda a: np.asarray(a) * 4, nnx.to_pure_dict(nnx.state(layer)))
    nnx.update(layer, params)
    # a model's of one layer, whose tokens stand for the rows of X
    model = {
        "embedding": {"table": X.reshape(-1, config.d_model)},
        "layers": jax.tree.map(lambda a: a[None], params),
    }
    tokens, shape = np.arange(12).reshape(2, 6), cases.shape(name, config, ranks=1)
    expected = reference.evaluate(reference.streams, model, tokens, shape)[0]

    def run(layer, x, axes=()):
        topology = residual.of_model(config)
        wire, context = topology.wire(axes), LayerContext(config, x.shape[1], axes=axes)
        state = residual.begin(x, topology=topology, axes=axes)
        return wire.flush(layer(state, steps=topology.layers[0], wire=wire, contexts=[context])[0])

    assert cases.error(run(layer, X), expected) < LIMIT
    graph, state = nnx.split(layer)
    local = lambda state, x: run(nnx.merge(graph, state), x, axes=("tensor",))
    specs = (nn.partition_specs(layer), P())
    on_ranks = jax.shard_map(
        local, mesh=parallel.make_mesh(tensor=2), in_specs=specs, out_specs=P()
    )
    assert cases.error(jax.jit(on_ranks)(state, X), expected) < LIMIT


def test_rngs_decide_the_values():
    """That the mesh does not: tests/test_numerics.py."""
    config = cases.model("ladder", num_layers=1)
    rngs = nnx.Rngs(0)
    one, other = (nn.Transformer(config, rngs=nnx.Rngs(seed)).params for seed in (0, 1))
    assert not np.array_equal(one["layers"]["mlp"]["down"], other["layers"]["mlp"]["down"])
    first, second = (nn.MLP(config, rngs=rngs).down[...] for _ in range(2))
    assert not np.array_equal(first, second)  # a stream gives each module its own
    with refused(r"takes either rngs=nnx.Rngs\(seed\), for new weights, or params="):
        nn.Transformer(config)
