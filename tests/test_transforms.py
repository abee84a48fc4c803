"""The model under a user's own transforms, where the devices' compiler has options: jax takes the
outermost's alone.

A CPU has none in the library's table, so it is given one here.
"""

import concurrent.futures
import gc
import importlib.util
import weakref

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ladder_jax import decode, nn, parallel
from ladder_jax.config import Loop, Phase
from ladder_jax.parallel import Compiled, Overlap, Traits, mesh
from ladder_jax.parallel.compiler_options import TABLE, Option
from tests import cases

CONFIG = cases.model("ladder", num_layers=1, d_model=16, num_heads=2, num_kv_heads=2, d_ff=16)
VALUE_LIMIT = cases.bound(CONFIG)
GRADIENT_LIMIT = cases.bound(CONFIG, passes=2)
TOKENS = cases.tokens((2, 6))
OPTION = "xla_cpu_enable_fast_math"


@pytest.fixture(scope="module", autouse=True)
def an_option_for_the_cpu():
    with pytest.MonkeyPatch.context() as patch:
        row = Option(OPTION, False, "for this test", waits=True)
        patch.setitem(TABLE, jax.devices()[0].device_kind, (row,))
        nn.compiled_logits.cache_clear()
        yield
    nn.compiled_logits.cache_clear()


@pytest.fixture(scope="module")
def model():
    mesh = parallel.make_mesh(tensor=2)
    params = cases.parameters(nn.define(CONFIG, mesh=mesh))
    return nn.Transformer(CONFIG, mesh=mesh, params=params)


def loss(logits):
    """A number in which every logit counts, each with another weight."""
    return jnp.mean(
        logits * jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
    )


@pytest.fixture(scope="module")
def expected(model):
    """The untraced call's logits and loss, and the gradient of the plain function that it
    compiles.
    """
    assert nn.compiled_logits(model.definition).options == {OPTION: False}
    plain = nn.compiled_logits(model.definition).__wrapped__
    logits = model(TOKENS)
    return (
        logits,
        loss(logits),
        jax.jit(jax.grad(lambda params: loss(plain(params, TOKENS))))(model.params),
    )


def of_model(model):
    return loss(model(TOKENS))


def of_params(graph):
    return lambda params: of_model(nnx.merge(graph, params))


VALUES = {
    "jit of closed-over tokens": lambda model: jax.jit(lambda: model(TOKENS))(),
    "nnx.jit": lambda model: nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS),
    "capture": lambda model: nnx.capture(model, nnx.Intermediate)(TOKENS)[0],
    "vmap": lambda model: jax.vmap(model)(jnp.stack([TOKENS, TOKENS]))[1],
    "scan": lambda model: jax.lax.scan(
        lambda _, tokens: (None, model(tokens)), None, jnp.stack([TOKENS] * 2)
    )[1][1],
    "cond": lambda model: jax.lax.cond(
        True, model, lambda tokens: 0 * model(tokens), jnp.asarray(TOKENS)
    ),
}


@pytest.mark.parametrize("transform", VALUES.values(), ids=VALUES)
def test_values(transform, model, expected):
    assert cases.error(transform(model), expected[0]) < VALUE_LIMIT


def test_a_table_of_the_model(model):
    """While it is made, flax replaces the public functions of the classes: static ones would be
    methods ever after. It cannot follow what a first call traces, so the model has been called.
    """
    model(TOKENS)
    assert "Transformer" in nnx.tabulate(model, TOKENS)
    again = nn.Transformer(CONFIG, params=model.params, mesh=model.definition.layout.mesh)
    assert again.definition == model.definition


def test_shapes(model):
    for found in (
        jax.eval_shape(model, TOKENS),
        jax.eval_shape(model, jax.ShapeDtypeStruct(TOKENS.shape, jnp.int32)),
    ):
        assert found == jax.ShapeDtypeStruct((*TOKENS.shape, CONFIG.vocab_size), jnp.float32)
    assert "shard_map" in str(jax.make_jaxpr(model)(TOKENS))


def with_params(transform):
    """A (model) -> (loss, nested dict of gradients), of a transform of (params) -> loss."""

    def run(model):
        graph, params = nnx.split(model)
        return pure(*transform(of_params(graph))(params))

    return run


def scanned(of_params):
    """In one of two turns of a program, as a training loop inside `lax.scan` has them."""
    turn = lambda params, _: (params, jax.value_and_grad(of_params)(params))
    return lambda params: jax.tree.map(lambda a: a[1], jax.lax.scan(turn, params, length=2)[1])


GRADIENTS = {
    "value_and_grad of checkpoint": with_params(
        lambda f: jax.jit(jax.value_and_grad(jax.checkpoint(f)))
    ),
    "value_and_grad in scan": with_params(scanned),
    "vjp": with_params(
        lambda f: (
            lambda params: (lambda out, pull: (out, pull(jnp.float32(1))[0]))(*jax.vjp(f, params))
        )
    ),
    "nnx.jit of nnx.value_and_grad": lambda model: pure(
        *nnx.jit(nnx.value_and_grad(of_model))(model)
    ),
}


def pure(value, grads):
    return value, nnx.to_pure_dict(grads)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, model, expected):
    value, grads = GRADIENTS[name](model)
    assert cases.error(value, expected[1]) < VALUE_LIMIT
    errors = jax.tree.map(cases.error, grads, expected[2])
    assert max(jax.tree.leaves(errors)) < GRADIENT_LIMIT, errors


def test_whether_something_is_traced():
    """Whatever the arguments are, in other threads, and where the module is first imported inside a
    trace.
    """

    def imported():
        spec = importlib.util.spec_from_file_location("again", mesh.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    inside = []
    jax.jit(lambda: inside.append(imported()))()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for module in (mesh, *inside):
            asked = lambda x, module=module: 0 * x + module.tracing()
            assert not module.tracing()
            assert not other.submit(module.tracing).result()
            assert all(
                transform(asked)(jnp.ones(2)).all()
                for transform in (jax.jit, jax.vmap, jax.checkpoint)
            )
            assert other.submit(jax.jit(asked), 0).result()


def test_every_compiled_function_is_one_inside_a_trace():
    """Whatever the library compiles: no options inside, no donation, and with both outside, on any
    thread.
    """
    traits = Traits(Overlap.HIDES, Phase.TRAIN, Loop.SCAN)
    program = Compiled(
        lambda x, y: (x + y, y), mesh=parallel.make_mesh(), traits=traits, donate_argnums=0
    )
    assert program.options == {OPTION: False}
    x = jnp.ones(4)
    y = jnp.ones(4)
    assert jax.grad(lambda x: program(x, y)[0].sum())(x)[0] == 1
    assert not x.is_deleted()
    assert jax.jit(program)(x, y)[0][0] == 2
    assert not x.is_deleted()
    assert program(x, y)[0][0] == 2
    assert x.is_deleted()


def test_a_sweep_over_models_keeps_the_newest_programs():
    made = lambda width: nn.compiled_logits(cases.define("ladder", d_ff=width))
    oldest = weakref.ref(made(8))
    for width in range(16, 530, 8):
        made(width)
    gc.collect()
    assert oldest() is None
    definition = cases.define("ladder", d_ff=528)
    assert made(528) is nn.compiled_logits(definition)
    prefills = lambda: [
        decode.prefill(definition, capacity=capacity) for capacity in range(32, 128)
    ]
    assert all(first is again for first, again in zip(prefills(), prefills()))
