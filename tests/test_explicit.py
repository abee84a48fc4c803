"""Meshes as jax makes them, whose axes are Explicit, and meshes set by `jax.set_mesh`: the numbers
of the reference, with other Explicit code before and after, for arguments of any sharding.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ladder_jax as lj
from ladder_jax import decode, nn, residual
from ladder_jax.config import DecodeConfig, Loop, Quantize, TrainConfig
from ladder_jax.decode import weights
from ladder_jax.train import step
from ladder_jax.train.gradients import loss_and_gradients
from tests import cases, covering
from tests.refusals import refused
from tests.test_your_layers import (
    LIMIT,
    SETTINGS,
    STACKED,
    Pair,
    X,
    call,
    check_rule,
    pair,
    with_gradients,
)

CONFIG = cases.model("ladder", num_layers=1)
TOKENS = cases.tokens()
VALUES = cases.bound(CONFIG)
GRADIENTS = cases.bound(CONFIG, passes=2)
PROMPT = TOKENS[0, :5].tolist()
LOGITS = functools.partial(cases.dense_logits, "ladder", 1, num_layers=1)
LOSS_AND_GRADIENTS = functools.partial(cases.dense_gradients, "ladder", 1, num_layers=1)
TABLE = np.random.default_rng(2).standard_normal((251, 8)).astype(np.float32) / 16
MESHES = {  # sizes, names, which are ours, and the names of rows and heads
    "our names": ((2, 1, 4), ("data", "fsdp", "tensor"), {}, "data", "tensor"),
    "other names": ((2, 4), ("dp", "tp"), dict(data="dp", tensor="tp"), "dp", "tp"),
    "another order": ((4, 2, 1), ("tp", "fsdp", "stage"), dict(tensor="tp"), "fsdp", "tp"),
    "shared heads": ((1, 8), ("dp", "tensor"), dict(data="dp"), None, "tensor"),
    "shared Auto heads": ((1, 8), ("dp", "tensor"), dict(data="dp"), None, None),
    "Explicit rows": ((2, 4), ("data", "tensor"), {}, "data", None),
}
TRANSFORMS = {
    "nnx.jit": nnx.jit,
    "none": lambda f: f,
    "jax.jit": lambda f: lambda m, *args: jax.jit(functools.partial(f, m))(*args),
}


# They differ most from ours: other names, rows by type alone, and ranks that share a head.
SOME = "other names", "Explicit rows", "shared heads"


@functools.cache
def example(name, layers=1):
    """(the mesh, a model on it, the names of rows and heads)."""
    sizes, names, axes, rows, heads = MESHES[name]
    mesh = jax.make_mesh(sizes, names, None if heads else (AxisType.Explicit, AxisType.Auto))
    return mesh, model_on(lj.mesh_of(mesh, axes=axes), layers), rows, heads


def model_on(mesh, layers=1):
    config = cases.model("ladder", num_layers=layers)
    return nn.Transformer(config, mesh=mesh, params=cases.parameters(nn.define(config, mesh=mesh)))


def two_by_four(*names):
    return jax.make_mesh((2, 4), names or ("data", "tensor"))


def setting(mesh, is_set=True):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def same_types(found, like):
    return jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, like)


@pytest.mark.parametrize("name, transform", covering.rows(MESHES, TRANSFORMS, pairs=[], even=[1]))
def test_values_between_explicit_code(name, transform):
    """Results have types by which matmuls go on; under nnx.jit, jax.jit and outside of a trace."""
    mesh, model, rows, heads = example(name)

    def between(model, tokens, table):
        logits = model(jnp.where(tokens < 0, 0, tokens))
        assert jax.typeof(logits).sharding == NamedSharding(mesh.abstract_mesh, P(rows, None, None))
        return jnp.einsum("btv,vx->btx", jnp.sin(logits), table, out_sharding=P(rows, None, heads))

    with setting(mesh):
        table = jax.device_put(TABLE, P(None, heads))
        tokens = jax.device_put(TOKENS, P(rows))
        found = TRANSFORMS[transform](between)(model, tokens, table)
        assert cases.error(found, np.sin(LOGITS()) @ TABLE) < 100 * VALUES
        assert jax.typeof(found).sharding.spec == P(rows, None, heads)


GIVEN = covering.marked(
    itertools.product(MESHES, (True, False)), chosen=[*zip(SOME, (True, False))]
)


@pytest.mark.parametrize("name, is_set", GIVEN)
def test_arguments_of_any_sharding(name, is_set):
    """Of other meshes over the same devices, too."""
    mesh, model, rows, _ = example(name)
    ours = lj.make_mesh(data=4, tensor=2)
    other = jax.make_mesh((4, 2), ("x", "y"))
    with setting(mesh, is_set):
        for tokens in (
            TOKENS,
            jnp.asarray(TOKENS),
            jax.device_put(TOKENS, NamedSharding(mesh, P(None, rows))),
            jax.device_put(TOKENS, NamedSharding(ours, P("data", "tensor"))),
            jax.device_put(TOKENS, NamedSharding(other, P("x", "y"))),
        ):
            logits = model(tokens)
            assert cases.error(logits, LOGITS()) < VALUES
            assert logits.sharding.mesh == mesh


SPLIT = [name for name in MESHES if name != "another order"]
FORMS = "nnx.jit", "jax.jit"


@pytest.mark.parametrize("name, form", covering.marked(
    itertools.product(SPLIT, FORMS),
    chosen=[("our names", "nnx.jit"), ("shared heads", "jax.jit"), ("shared Auto heads", "jax.jit")],
))  # fmt: skip
def test_gradients_between_explicit_code(name, form):
    """Of the model's parameters, with their types: an optimizer goes on with them."""
    mesh, model, rows, _ = example(name)
    graph, params = nnx.split(model)

    def loss_of(model, tokens):
        logits = model(tokens[:, :-1])
        chosen = jnp.einsum(
            "btv,btv->bt", logits, jax.nn.one_hot(tokens[:, 1:], 251), out_sharding=P(rows)
        )
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    if form == "nnx.jit":
        compute = nnx.jit(nnx.value_and_grad(loss_of))
        of = model
    else:
        of_params = lambda params, tokens: loss_of(nnx.merge(graph, params), tokens)
        compute = jax.jit(jax.value_and_grad(of_params))
        of = params
    with setting(mesh):
        value, found = compute(of, jax.device_put(TOKENS, P(rows)))
        moved = jax.jit(lambda p, g: jax.tree.map(lambda p, g: p - 0.1 * g, p, g))(params, found)
    assert same_types((found, moved), (params, params))
    found = value, nnx.to_pure_dict(found)
    cases.assert_close(found, LOSS_AND_GRADIENTS(), definition=model.definition)


@pytest.mark.parametrize("name", covering.marked([("Explicit rows",)], chosen=[("other names",)]))
def test_a_training_step(name):
    """Its state keeps its types."""
    mesh, model, *_ = example(name)
    config = TrainConfig(batch=4, sequence=9, steps=3)
    loss, gradients = LOSS_AND_GRADIENTS()
    norm = np.linalg.norm([np.linalg.norm(g) for g in jax.tree.leaves(gradients)])
    with setting(mesh):
        before = step.initial_state(
            model.definition, config=config, params=jax.tree.map(jnp.copy, model.params)
        )
        expected = step.abstract_state(model.definition, config=config)
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), before, expected
            )
        )
        train = step.train_step(model.definition, config=config)
        after, metrics = train(before, TOKENS)
        assert same_types(after, before)
        assert not metrics["bad"]
        after, _ = train(after, TOKENS)
        jax.jit(lambda params: jax.tree.map(jnp.square, params))(after.params)
    assert abs(float(metrics["loss"]) - loss) < GRADIENTS * loss
    assert abs(float(metrics["gradient_norm"]) - norm) < GRADIENTS * norm


def generated(generator, **settings):
    return generator.tokens([PROMPT], config=DecodeConfig(max_new_tokens=20, **settings))[0]


@functools.cache
def greedy(layers=1):
    """By the reference's rule, a token at a time, on one device."""
    return generated(decode.Generator(model_on(lj.make_mesh(), layers)))


VARIANTS = (Loop.UNROLLED, Quantize.NONE), (Loop.SCAN, Quantize.NONE), (Loop.SCAN, Quantize.INT8)
GENERATED = covering.marked(
    itertools.product(SPLIT, VARIANTS, (True, False)),
    chosen=[*zip(SOME, VARIANTS, (True, False, True))],
)


@pytest.mark.parametrize("name, variant, is_set", GENERATED)
def test_generation(name, variant, is_set):
    """Prefill's logits are the reference's; tokens those of one device, by either loop: over two
    layers, as one is no loop.
    """
    mesh, model, *_ = example(name, 2)
    loop, quantize = variant
    with setting(mesh, is_set):
        found = generated(decode.Generator(model, loop=loop, quantize=quantize), prefill_chunk=2)
        assert quantize is Quantize.INT8 or (found == greedy(2)).all()
        logits, caches = decode.prefill(model.definition, capacity=32)(
            weights.prepare(model.definition, model.params, loop=Loop.UNROLLED),
            TOKENS,
            np.full(4, 10),
        )
        if is_set:
            jax.jit(lambda caches: jax.tree.map(jnp.square, caches))(caches)
    expected = LOGITS(num_layers=2)[:, -1]
    assert cases.error(np.asarray(logits)[:, :251], expected) < cases.bound(model.config)


def test_a_model_with_its_text(tmp_path):
    """Made on the mesh that is set; generated from, saved and loaded."""
    with setting(two_by_four()):
        model = lj.Transformer(
            cases.model("ladder", num_layers=1, vocab_size=256), rngs=nnx.Rngs(0)
        )
        text = model.generate("a", max_new_tokens=4)
        assert model.mesh == jax.sharding.get_mesh()
        assert model.definition.layout.ranks == 4
        model.save(tmp_path / "model")
        again = lj.load(tmp_path / "model")
        assert same_types(again.params, model.params)
        assert again.generate("a", max_new_tokens=4) == text
    alone = lj.Transformer(model.config, rngs=nnx.Rngs(0))
    assert alone.mesh.size == 1
    errors = jax.tree.map(cases.error_but_for_padding, alone.params, model.params)
    assert not any(jax.tree.leaves(errors))


def test_a_model_of_make_mesh_among_explicit_code():
    """Its parameters stay on its own mesh; results lie on the one that is set, whatever its axes
    are called.
    """
    model = model_on(lj.make_mesh(data=2, tensor=4))
    expected = LOGITS()
    for names, spec in (
        (("data", "tensor"), P("data", None, None)),
        (("x", "y"), P(None, None, None)),
    ):
        with setting(two_by_four(*names)):
            logits = model(TOKENS)
            assert logits.sharding.spec == spec
            assert cases.error(jnp.sin(logits), np.sin(expected)) < 10 * VALUES
            assert cases.error(jax.jit(lambda tokens: model(tokens) + 0)(TOKENS), expected) < VALUES
            assert (generated(decode.Generator(model)) == greedy()).all()


def test_a_model_of_make_mesh_where_that_mesh_is_set():
    """Whose ranks share a key/value head: it has no axes for them."""
    shared = model_on(lj.make_mesh(tensor=8))
    with setting(lj.make_mesh(tensor=8)):
        found = jax.jit(loss_and_gradients(shared.definition))(shared.params, TOKENS)
        assert cases.error(shared(TOKENS), LOGITS()) < VALUES
    cases.assert_close(found, LOSS_AND_GRADIENTS(), definition=shared.definition)


SPECS = P("data"), P(None, None, None, "tensor", None)


OWN = covering.rows(
    ["ladder", "standard", "parallel-ladder"], Loop, [("tensor",), ("data", "tensor")]
)


@pytest.mark.parametrize("name, loop, axes", OWN)
def test_layers_of_your_own(name, loop, axes):
    """`residual.run` in a shard_map over the whole mesh, or over the tensor axis alone, the rows
    split by type.
    """
    topology = residual.topology(name, num_layers=3)
    local = lambda x, stacked: residual.run(topology, pair, x, params=stacked, loop=loop)
    specs = SPECS if len(axes) == 2 else (P(), SPECS[1])
    mapped = jax.shard_map(local, in_specs=specs, out_specs=specs[0], axis_names=set(axes))
    with setting(two_by_four()):
        x, stacked = (jax.device_put(a, spec) for a, spec in zip((X, STACKED), SPECS))
        found = jax.jit(with_gradients(lambda x, w: mapped(x / 2 * 2, w)))(x, stacked)
        assert same_types(found, (x, x, stacked))
    check_rule(found, name)


def test_a_stack_of_your_own():
    """In a shard_map that splits its matrices, and split by types alone."""
    one = residual.Stack(Pair, rngs=nnx.Rngs(0), axes=(), **SETTINGS)

    def spec(path, array):
        is_up = "up" in jax.tree_util.keystr(path)
        return P(*[None] * (array.ndim - 1), "tensor") if is_up else P(None, "tensor")

    with setting(two_by_four()):
        graph, params = nnx.split(residual.Stack(Pair, rngs=nnx.Rngs(0), **SETTINGS))
        specs = jax.tree_util.tree_map_with_path(spec, params)
        local = lambda params, x: nnx.merge(graph, params)(x)
        mapped = jax.shard_map(local, in_specs=(specs, P("data")), out_specs=P("data"))
        split = lambda params, x: mapped(jax.reshard(params, specs), jax.reshard(x, P("data")))
        assert cases.error(jax.jit(split)(params, X), one(X)) < LIMIT
        whole = call(one, jax.device_put(X, P("data")))
    assert cases.error(whole, one(X)) < LIMIT


def wrong(names, sizes=(2, 4), **axes):
    return lambda: lj.mesh_of(jax.make_mesh(sizes, names), axes=axes or None)


@pytest.mark.parametrize("said, make", {
    r"has the axes \('dp', 'tp'\), and a model's are .*axes={'data': 'dp', 'tensor': 'tp'}\)": wrong(("dp", "tp")),
    r"name them by ladder_jax.mesh_of\(mesh, axes={'tensor': 'model'}\)": wrong(("data", "model")),
    r"axes={'data': 'dp', 'tensor': 'tp'}": wrong(("dp", "tp"), data="dp"),
    r"axes={'data': 'a', 'fsdp': 'b', 'tensor': 'c'}": wrong(("a", "b", "c"), (2, 2, 2)),
    "unknown axis 'tensr'; did you mean 'tensor'": wrong(("dp", "tp"), tensr="tp"),
    "unknown axis of the mesh 'tpp'; did you mean 'tp'": wrong(("dp", "tp"), tensor="tpp"),
    "axes must name an axis of the mesh once": wrong(("dp", "tp"), tensor="tp", data="tp"),
    "mesh must be of type Mesh, not 8": lambda: lj.mesh_of(8),
    "axes must be of type Mapping, not a tuple": lambda: lj.mesh_of(lj.make_mesh(), axes=("tp",)),
    "inside jax.jit and the like needs its": lambda: nnx.eval_shape(lambda: nn.Transformer(CONFIG, rngs=nnx.Rngs(0))),
    "set by jax.set_mesh has 8 devices, and this model's 1: make the model": lambda: model_on(lj.make_mesh())(TOKENS),
    "has the axes .'x',., and a model's are": lambda: nn.Transformer(CONFIG, rngs=nnx.Rngs(0)),
}.items())  # fmt: skip
def test_what_is_refused(make, said):
    with setting(jax.make_mesh((8,), ("x",))), refused(said):
        make()


def test_sizes_by_our_names():
    mesh = lj.mesh_of(
        jax.make_mesh((4, 2, 1), ("tp", "dp", "stage")), axes={"tensor": "tp", "data": "dp"}
    )
    assert mesh.shape == dict(data=2, fsdp=1, tensor=4)
    assert lj.mesh_of(mesh) is mesh
    assert mesh.own.axis_names == ("tensor", "data", "fsdp")
    assert list(mesh.devices.flat) == list(mesh.mesh.devices.flat)
    assert lj.mesh_of(two_by_four()).own == lj.make_mesh(data=2, tensor=4)
