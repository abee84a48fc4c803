"""Two halves of a batch in turn: the function of the whole batch, for every topology, and sums that
stand apart.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ladder_jax import config, decode, nn, parallel, residual, train
from ladder_jax.config import ExpertParallelism, Launch, Loop, Remat
from ladder_jax.data.packing import Batch
from ladder_jax.decode import steps, weights
from ladder_jax.errors import UserError
from ladder_jax.scopes import ENTER, LAUNCH
from tests import cases, communication, covering, experts, reference

REDUCING = [name for name, case in cases.TOPOLOGIES.items() if case[2] not in ("desync", "none")]
# of tokens [B, T + 1]: halves of rows, of those of a split stream, and, of an odd number, of
# sequences
FORMS = {
    "rows": ((4, 9), {}),
    "split rows": ((4, 9), dict(sequence_parallel=True)),
    "sequences": ((3, 10), {}),
}
REMATS = [Remat.NONE, Remat.FULL, Remat.SAVE_MATMULS]
RECURRENCES = [name for name in cases.RECURRENCES if name in REDUCING]
GRADIENTS = covering.marked(
    itertools.product(REDUCING, FORMS, Loop, REMATS),
    chosen=covering.array(RECURRENCES, FORMS, Loop, REMATS, pairs=[(1, 2)], even=[3]),
)


@functools.cache
def dense(name, shape):
    """(loss, gradients) of the reference."""
    definition = cases.define(name, tensor=4)
    of = cases.shape(name, definition.config, ranks=4)
    params = cases.parameters(definition)
    return reference.evaluate(reference.loss, params, cases.tokens(shape), of, gradient=True)


def compiled(definition, shape, **settings):
    """(the program, its arguments) of loss and gradients in two halves."""
    params = cases.placed(definition)
    batch = jax.device_put(cases.tokens(shape), definition.layout.sharding("BT"))
    run = jax.jit(train.loss_and_gradients(definition, interleave=2, **settings))
    return run.lower(params, batch).compile(), (params, batch)


@pytest.mark.parametrize("name, form, loop, remat", GRADIENTS)
def test_gradients(name, form, loop, remat):
    """Against the float64 reference; and every half's every sum is an all-reduce of its own, in
    both directions.
    """
    definition, (shape, split) = cases.define(name, tensor=4), FORMS[form]
    program, arguments = compiled(definition, shape, loop=loop, remat=remat, **split)
    cases.assert_close(program(*arguments), dense(name, shape), definition=definition)
    if split or loop is Loop.SCAN:
        return
    found = communication.all_reduces(program.as_text())
    assert all(operands == 1 for *_, operands, _ in found), "merged"
    for direction in (LAUNCH, ENTER):
        assert sum(one[0] == direction for one in found) == 2 * communication.IN_ALL[name]


@pytest.mark.parametrize("mesh, settings", [
    (dict(data=2, fsdp=2, tensor=2), dict(accumulate=2, remat=Remat.FULL)),
    pytest.param(dict(data=2, fsdp=2, tensor=2), dict(accumulate=2, loop=Loop.UNROLLED), marks=pytest.mark.full),
    pytest.param(dict(fsdp=2, tensor=2), dict(remat=Remat.FULL), marks=pytest.mark.full),
])  # fmt: skip
def test_beside_the_other_axes(mesh, settings):
    definition = cases.define("hybrid-list", **mesh)
    program, arguments = compiled(definition, (16, 9), **settings)
    cases.assert_close(program(*arguments), dense("hybrid-list", (16, 9)), definition=definition)


@pytest.mark.parametrize("rows", [3, pytest.param(4, marks=pytest.mark.full)])
def test_packed_documents(rows):
    """A position of the later half attends to those of its own document in the first one, and to no
    other.
    """
    definition = cases.define("ladder", tensor=4)
    segments = np.repeat(np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 3]]), rows, 0)
    batch = Batch(tokens=cases.tokens((rows, 10)), segments=segments, loss_mask=None)
    params = cases.placed(definition)
    whole, halves = (
        jax.jit(train.loss_and_gradients(definition, interleave=count))(params, batch)
        for count in (1, 2)
    )
    cases.assert_close(halves, whole, definition=definition)


@pytest.mark.parametrize("name", ["standard", pytest.param("ladder", marks=pytest.mark.full)])
def test_experts_whose_sums_are_reduced(name):
    """Their statistics are sums over both halves, so the routers' losses are those of the whole
    batch.
    """
    definition = experts.define(name, "shared", tensor=4)
    experts.check_gradients(definition, experts.dense_gradients(name, "shared"), interleave=2)


@pytest.mark.parametrize(
    "name, loop, rows",
    covering.rows(
        ["standard", "ladder-fresh", "hybrid-delay-2"], Loop, (4, 1, 3), pairs=[], even=[1]
    ),
)
def test_prefill(name, loop, rows):
    """Logits and caches, of halves of rows and of a row's positions: the second reads what the
    first has written.
    """
    definition = cases.define(name, tensor=4)
    params = weights.prepare(definition, cases.placed(definition), loop=loop)
    tokens, lengths = cases.tokens((rows, 8)), np.array([8, 5, 7, 3], np.int32)[:rows]
    whole, halves = (
        steps.prefill(definition, capacity=32, loop=loop, interleave=count)(params, tokens, lengths)
        for count in (1, 2)
    )
    limit = cases.bound(definition.config)
    real = slice(definition.config.vocab_size)
    assert cases.error(halves[0][:, real], whole[0][:, real]) < limit
    for a, b in zip(jax.tree.leaves(halves[1]), jax.tree.leaves(whole[1]), strict=True):
        assert cases.error(a, b) < limit


@pytest.mark.parametrize("name, changes, count", [
    ("standard", dict(tensor=8), 4 * communication.NUM_LAYERS - 1),
    pytest.param("ladder", dict(tensor=8), 4 * communication.NUM_LAYERS - 1, marks=pytest.mark.full),
    ("standard", dict(tensor=4, qk_norm="all-heads"), 2 * communication.NUM_LAYERS),
])  # fmt: skip
def test_prefill_that_starts_and_awaits_apart(name, changes, count, monkeypatch):
    """Every half's every sum but the last is started before the other half's sublayer; only MLPs
    stand beside one where attention's query and key norms reduce over all heads.
    """
    started = communication.start_on_a_cpu(monkeypatch)
    definition = cases.define(name, **changes)
    params = weights.prepare(definition, cases.placed(definition), loop=Loop.UNROLLED)
    tokens, lengths = cases.tokens((4, 8)), np.full(4, 8, np.int32)
    settings = dict(capacity=16, loop=Loop.UNROLLED)
    halves = steps.prefill.__wrapped__(definition, launch=Launch.EXPLICIT, interleave=2, **settings)
    found = halves(params, tokens, lengths)[0]
    assert len(started) == count
    whole = steps.prefill(definition, launch=Launch.CHAINED, **settings)(params, tokens, lengths)[0]
    real = slice(definition.config.vocab_size)
    assert cases.error(found[:, real], whole[:, real]) < cases.bound(definition.config)


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.full)])
def test_text_of_prompts_that_are_read_in_halves(rows):
    """Whole, in chunks, and by the engine: the same tokens."""
    definition = cases.define("standard", tensor=2, num_layers=2)
    params = cases.placed(definition)
    prompts = [list(row) for row in cases.tokens((rows, 40))]
    texts = []
    for interleave, chunk in (1, 2048), (2, 2048), (2, 16):
        settings = config.DecodeConfig(max_new_tokens=5, prefill_chunk=chunk, interleave=interleave)
        texts.append(decode.Generator(definition, params).tokens(prompts, config=settings))
    for text in texts[1:]:
        np.testing.assert_array_equal(text, texts[0])
    engine = decode.Engine(definition, params, slots=2, capacity=48, interleave=2, prefill_chunk=16)
    handles = engine.submit_all(
        [decode.Request(tuple(prompt), max_new_tokens=5) for prompt in prompts]
    )
    engine.run()
    np.testing.assert_array_equal([handle.result().tokens for handle in handles], texts[0])


def block(layer):
    norm = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return (
        lambda x: jnp.tanh(norm(x) @ layer["a"]) @ layer["b"],
        lambda x: jax.nn.relu(norm(x) @ layer["c"]) @ layer["d"],
    )


def own_layers(rows, **settings):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.4 * rng.standard_normal(shape), jnp.float32)
    x, params = (
        draw(rows, 3, 8),
        {name: draw(3, *((8, 16) if name in "ac" else (16, 8))) for name in "abcd"},
    )
    specs = {
        name: P(None, None, "tensor") if name in "ac" else P(None, "tensor") for name in "abcd"
    }
    topology = residual.topology("ladder-2", num_layers=3)
    run = lambda x, params: residual.run(topology, block, x, params=params, **settings)
    mapped = jax.shard_map(
        run, mesh=parallel.make_mesh(tensor=4), in_specs=(P(), specs), out_specs=P()
    )
    return jax.jit(
        jax.value_and_grad(lambda x, params: jnp.sum(jnp.sin(mapped(x, params))), (0, 1))
    )(x, params)


@pytest.mark.parametrize("loop", Loop)
def test_layers_of_your_own(loop):
    whole, halves = (own_layers(4, loop=loop, interleave=count) for count in (1, 2))
    for a, b in zip(jax.tree.leaves(halves), jax.tree.leaves(whole), strict=True):
        assert cases.error(a, b) < 1e-5


def test_a_stack_of_your_own():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = (nnx.Linear(*sizes, rngs=rngs) for sizes in ((8, 16), (16, 8)))

        def attention(self, x):
            return self.down(jnp.tanh(self.up(x)))

        mlp = attention

    topology, x = residual.topology("ladder", num_layers=2), jnp.ones((2, 3, 8))
    made = [
        residual.Stack(Layer, topology=topology, rngs=nnx.Rngs(0), axes=(), interleave=count)(x)
        for count in (1, 2)
    ]
    assert cases.error(made[1], made[0]) < 1e-6


RUN = dict(model=config.preset("tiny"), mesh=config.MeshConfig(tensor=2))


def of_run(*, model=None, mesh=None, **settings):
    changed = config.TrainConfig(batch=4, sequence=8, steps=2, interleave=2, **settings)
    return config.RunConfig(**{**RUN, **(model or {}), **(mesh or {})}, train=changed)


def with_model(**changes):
    return dict(model=config.preset("tiny", **changes))


@pytest.mark.parametrize("made, said", [
    (lambda: of_run(model=with_model(residual="desync-2")), "train.interleave 2 is for a residual that reduces every"),
    (lambda: of_run(sequence_parallel=True, accumulate=4), "halves the rows of a split stream, and .* gives 1: an odd"),
    (
        lambda: of_run(sequence_parallel=True, collective_matmul=config.CollectiveMatmul.RING),
        "hides gathers and scatters, of which collective_matmul ring leaves none",
    ),
    (lambda: own_layers(3, interleave=2), "interleave=2 takes halves of the rows, and 3 is odd"),
    (lambda: own_layers(2, interleave=3), r"interleave must be 1 .* or 2 \(two halves of it in turn\), not 3"),
    (
        lambda: compiled(experts.define("farskip", "shared", tensor=4), (4, 10)),
        "interleave 2 is not for farskip with a shared expert, which is reduced with attention",
    ),
    (lambda: compiled(cases.define("desync-2", tensor=4), (4, 10)), "every sublayer's output, not desync-2"),
    (lambda: config.Execution(interleave=3), r"interleave must be 1 \(the whole batch\) or 2"),
    (
        lambda: steps.prefill(cases.define("standard", tensor=2), capacity=8, interleave=3),
        r"interleave must be 1 \(the whole batch\) or 2",
    ),
    (lambda: config.TrainConfig(interleave=3), r"unknown value for train.interleave: .* \(allowed: 1, 2, auto\)"),
    (lambda: config.DecodeConfig(interleave=0), r"unknown value for decode.interleave: .* \(allowed: 1, 2, auto\)"),
    (
        lambda: compiled(cases.define("standard", tensor=4), (4, 9), sequence_parallel=True,
                         collective_matmul=config.CollectiveMatmul.RING),
        "collective_matmul ring leaves none",
    ),
])  # fmt: skip
def test_what_is_refused(made, said):
    with pytest.raises(UserError, match=said):
        made()


def test_a_decode_step_is_refused():
    definition = cases.define("standard", tensor=4)
    one = steps.step(definition, execution=config.Execution(interleave=2))
    local = lambda lengths: one({}, None, lengths, lengths)[0]
    on_mesh = parallel.on_mesh(local, layout=definition.layout, in_dims=("B",), out_dims="BV")
    with pytest.raises(UserError, match="a decode step has too few tokens to halve"):
        jax.eval_shape(on_mesh, jnp.zeros(4, jnp.int32))


EXCHANGED = covering.marked(
    itertools.product(
        ["standard", "ladder", "ladder-2"], ["shared", "ungated", "routed"], Loop, REMATS
    ),
    chosen=[
        ("standard", "shared", Loop.UNROLLED, Remat.NONE),
        ("ladder", "ungated", Loop.SCAN, Remat.SAVE_MATMULS),
    ],
)


@pytest.mark.parametrize("name, kind, loop, remat", EXCHANGED)
def test_experts_that_exchange_rows(name, kind, loop, remat):
    """Every half's rows are sent by themselves."""
    moe = experts.KINDS[kind]
    moe = {**moe, "capacity": moe["experts"] / moe["top_k"]}
    mesh = parallel.make_mesh(
        data=2 if name == "ladder" else 1, tensor=2 if loop is Loop.SCAN else 4
    )
    definition = nn.define(
        experts.model(name, kind, moe=moe), mesh=mesh, experts=ExpertParallelism.EXCHANGE
    )
    settings = dict(loop=loop, remat=remat, sequence_parallel=True, interleave=2)
    text = experts.check_gradients(definition, experts.dense_gradients(name, kind), **settings)
    if loop is Loop.UNROLLED and remat is Remat.NONE:
        sent = text.count(" all-to-all(")
        assert sent == 3 * 2 * 2 * 2  # layers, to the experts and back, halves, directions


def test_prefill_of_experts_that_exchange_rows():
    moe = {**experts.KINDS["shared"], "capacity": 3.0}
    mesh = parallel.make_mesh(tensor=4)
    definition = nn.define(
        experts.model("standard", moe=moe), mesh=mesh, experts=ExpertParallelism.EXCHANGE
    )
    params = cases.placed(definition)
    params = weights.prepare(definition, params, loop=Loop.SCAN)
    tokens, lengths = cases.tokens((4, 8)), np.array([8, 5, 7, 3], np.int32)
    settings = dict(capacity=16, loop=Loop.SCAN, sequence_parallel=True)
    whole, halves = (
        steps.prefill(definition, interleave=count, **settings)(params, tokens, lengths)[0]
        for count in (1, 2)
    )
    real = slice(definition.config.vocab_size)
    assert cases.error(halves[:, real], whole[:, real]) < cases.bound(definition.config)
