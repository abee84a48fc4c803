"""Layers of a user's own under a topology: `residual.run` and `Stack`, and one line for what they
cannot take.
"""

import functools
import pickle
import types
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, residual
from ladder_jax.config import RESIDUALS, Loop, Phase
from ladder_jax.parallel import Overlap, Split, Traits, compiled
from tests import cases, covering
from tests.refusals import refused
from tests.test_residual import UNROLLED, example

AXES = ("tensor",)
EQUAL = P()
OUT = EQUAL, EQUAL, P(None, None, None, "tensor", None)  # of a result and its gradients
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
# L, sublayer, D, F, in/out
STACKED = np.random.default_rng(1).standard_normal((3, 2, 8, 16, 2)).astype(np.float32) / 4
# of six sublayers, each two contractions of 16 at most, in float32
LIMIT = 6 * 4 * 4 * cases.UNIT_ROUNDOFF


class Block:
    """A layer of `STACKED`: two sublayers of two matmuls, whose hidden dimension is split."""

    def __init__(self, weights):
        self._weights = weights

    def attention(self, x):
        return jnp.tanh(x @ self._weights[0, ..., 0]) @ self._weights[0, ..., 1].T

    def mlp(self, x):
        return jax.nn.relu(x @ self._weights[1, ..., 0]) @ self._weights[1, ..., 1].T


def compiled_on_ranks(local, *, tensor=2, out=EQUAL, check_vma=True):
    """`local` of the stream and each rank's slice of STACKED."""
    mesh = parallel.make_mesh(tensor=tensor)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=OUT[1:], out_specs=out, check_vma=check_vma)
    )


def on_ranks(local, **settings):
    return compiled_on_ranks(local, **settings)(X, STACKED)


def unrolled(x, blocks, *, name="ladder"):
    topology = residual.topology(name, num_layers=len(blocks))
    return example(UNROLLED, topology=topology, residual=residual, x=x, blocks=blocks)


DELAYS = {
    "standard": (0, 0),
    "ladder": (1, 1),
    "ladder-2": (2, 2),
    "parallel": (0, 1),
    "parallel-ladder": (2, 3),
}


pair = lambda weights: (Block(weights).attention, Block(weights).mlp)


def exactly(name, x, layers, *, of=pair):
    """The one rule in float64: x_i = x_{i-1} + h_i(x_{max(0, i-1-d_i)}), with x a list of all
    streams so far. of: a layer to its sublayers.
    """
    streams = [x]
    for layer in layers:
        for delay, sublayer in zip(DELAYS[name], of(layer)):
            streams.append(streams[-1] + sublayer(streams[max(0, len(streams) - 1 - delay)]))
    return streams[-1]


def float64(function):
    with jax.enable_x64(True):
        return jax.tree.map(
            np.asarray, jax.jit(function)(*(jnp.asarray(a, jnp.float64) for a in (X, STACKED)))
        )


def with_gradients(function):
    """Its result, and the gradients of the sum of its sine: one program."""

    def run(x, stacked):
        out, pull_back = jax.vjp(function, x, stacked)
        return out, *pull_back(jnp.cos(out))

    return run


@functools.cache
def exact_gradients(name):
    return float64(with_gradients(functools.partial(exactly, name)))


def check_rule(found, name):
    """A result and its gradients are the rule's."""
    errors = list(map(cases.error, found, exact_gradients(name)))
    assert errors[0] < LIMIT
    assert max(errors) < 2 * LIMIT


def test_a_scan_is_named_by_its_layers():
    """By which a schedule's report finds them."""
    run = compiled_on_ranks(of_run("ladder"))
    assert "layers_0_to_2/" in run.lower(X, STACKED).as_text(debug_info=True)


def of_run(name, **settings):
    topology = residual.topology(name, num_layers=len(STACKED))
    return lambda x, stacked: residual.run(topology, pair, x, params=stacked, **settings)


REMATS = "none", "full", "save-matmuls"


@pytest.mark.parametrize(
    "name, loop, remat", covering.rows(DELAYS, ("scan", "unrolled"), REMATS, pairs=[], even=[1, 2])
)
def test_run_is_the_rule(name, loop, remat):
    """And its gradients of the stream and of the weights, against float64."""
    check_rule(on_ranks(with_gradients(of_run(name, loop=loop, remat=remat)), out=OUT), name)


@pytest.mark.parametrize("name", RESIDUALS)
def test_run_is_the_docstrings_loop(name):
    """Of every topology, those that depend on the number of ranks among them."""
    out = P("tensor") if name == "no-communication" else EQUAL
    loop = lambda x, stacked: unrolled(x, [Block(weights) for weights in stacked], name=name)
    assert cases.error(on_ranks(of_run(name), out=out), on_ranks(loop, out=out)) < LIMIT


def gated(x):
    """A layer whose sublayers close over an array, as over positions or a mask."""
    return lambda weights: [lambda y, f=f: f(jnp.tanh(x) * y) for f in pair(weights)]


def test_what_sublayers_close_over_has_a_gradient():
    """Also where the backward pass computes unrolled layers again, of a program that is traced by
    then.
    """
    unrolled = dict(loop="unrolled", remat="full")
    run = compiled_on_ranks(lambda x, w: residual.run(THREE, gated(x), x, params=w, **unrolled))
    exact = float64(with_gradients(lambda x, w: exactly("ladder", x, w, of=gated(x))))
    assert max(map(cases.error, with_gradients(run)(X, STACKED), exact)) < 2 * LIMIT


def test_run_on_one_device_and_over_a_list():
    expected, *_ = exact_gradients("ladder")
    assert cases.error(jax.jit(of_run("ladder", axes=()))(X, STACKED), expected) < LIMIT
    of_list = lambda x, stacked: of_run("ladder", loop="unrolled")(
        x, [stacked[n] for n in range(len(STACKED))]
    )
    assert cases.error(on_ranks(of_list), expected) < LIMIT


class Weights(NamedTuple):
    attention: Any
    mlp: Any
    other: Any = 0


@pytest.mark.parametrize(
    "form, loop, ladder_layers",
    [
        (Weights, "scan", None),
        (Weights, "scan", "2"),
        (Weights, "unrolled", None),
        (lambda *stacks: stacks, "scan", None),  # unrolled, it is of each layer's own
        (lambda *stacks: stacks, "scan", "2"),
    ],
)
def test_run_over_a_tuple_of_stacks(form, loop, ladder_layers):
    """Which is no layer's own, whatever its length, and where a layer stands alone."""
    topology = residual.topology("ladder", num_layers=3, ladder_layers=ladder_layers)
    run = functools.partial(residual.run, topology, axes=(), loop=loop)
    of_each = lambda layer: pair(jnp.stack(layer[:2]))
    stacks = form(STACKED[:, 0], STACKED[:, 1], np.zeros(3))
    expected = run(pair, jnp.asarray(X), params=STACKED)
    assert cases.error(run(of_each, jnp.asarray(X), params=stacks), expected) < LIMIT


def half(weights):
    """The sublayers of a layer in bfloat16, on a float32 stream."""
    block = Block(weights.astype(jnp.bfloat16))
    return [lambda x, f=f: f(x.astype(jnp.bfloat16)) for f in (block.attention, block.mlp)]


HALF_LIMIT = LIMIT / cases.UNIT_ROUNDOFF * 2.0**-8  # bfloat16's


def test_run_of_bfloat16_sublayers_on_a_float32_stream():
    outs = [
        on_ranks(lambda x, w, loop=loop: residual.run(THREE, half, x, params=w, loop=loop))
        for loop in ("scan", "unrolled")
    ]
    assert outs[0].dtype == np.float32
    assert cases.error(*outs) < HALF_LIMIT
    assert cases.error(outs[0], exact_gradients("ladder")[0]) < HALF_LIMIT


@pytest.mark.parametrize("name", ["ladder", "ladder-2", "standard"])
def test_a_scan_of_sublayers_of_two_dtypes(name):
    """Of which either is pending between two layers."""
    topology = residual.topology(name, num_layers=len(STACKED))
    mixed = lambda weights: (pair(weights)[0], half(weights)[1])
    out = on_ranks(lambda x, w: residual.run(topology, mixed, x, params=w))
    assert cases.error(out, exact_gradients(name)[0]) < HALF_LIMIT


def double(weights):
    """A layer whose attention returns twice as many channels as it reads."""
    first, second = pair(weights)
    return lambda x: jnp.concatenate([first(x)] * 2, -1), second


THREE = residual.topology("ladder", num_layers=3)
MANY = r"params must hold 3 layers, as the topology does: arrays \[3, ...\], or .*; they hold"
REFUSED = {
    "unknown value for loop: 'scann'; did you mean 'scan'": dict(loop="scann"),
    "unknown value for remat: 'ful'; did you mean 'full'": dict(remat="ful"),
    f"{MANY} 2": dict(params=STACKED[:2]),
    "or with loop=.unrolled. a list of each layer.s own; they hold 2": dict(
        params=list(STACKED[:2]), loop="unrolled"
    ),
    f"{MANY} 3, an array without layers": dict(params=(STACKED, jnp.float32(1))),
    r"has the sublayers \(attention, MLP\), not 3": dict(
        blocks=lambda weights: (*pair(weights), Block(weights).mlp)
    ),
    r"\(attention, MLP\), not 1": dict(blocks=lambda weights: pair(weights)[:1]),
    r"must return \[B, T, D\] as it reads, \(2, 4, 8\), not \(2, 4, 16\)": dict(blocks=double),
    r"a tuple of the mesh's axes, as in \('tensor',\), not 'tensor'": dict(axes="tensor"),
    "axes must be a tuple of the mesh's axes' names, not None": dict(axes=None),
    r"axes must be a tuple of the mesh's axes' names, not \(0,\)": dict(axes=(0,)),
    "x must be of floating point, not int": dict(x=np.ones((2, 4, 8), int)),
    "unknown mesh axis 'tensr'; did you mean 'tensor'": dict(axes=("tensr",)),
}


@pytest.mark.parametrize("said, settings", REFUSED.items())
def test_what_run_refuses(settings, said):
    with refused(said):
        on_ranks(
            lambda x, w: residual.run(THREE, **{**dict(blocks=pair, x=x, params=w), **settings})
        )


def test_without_ranks():
    with refused("no ranks of 'tensor' here: call it inside jax.shard_map"):
        of_run("ladder")(jnp.asarray(X), STACKED)
    with refused("x must be of floating point, not int"):
        residual.begin(jnp.arange(8), topology=THREE, axes=())
    one = residual.begin(jnp.asarray(X), topology=THREE, axes=())  # one rank, without a mesh
    assert one.residual.shape == X.shape


class Sublayer(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up = nnx.Linear(8, width, rngs=rngs)
        self.down = nnx.Linear(width, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class Pair(nnx.Module):
    def __init__(self, *, rngs):
        self.first, self.second = Sublayer(16, rngs=rngs), Sublayer(32, rngs=rngs)


SETTINGS = dict(topology=THREE, sublayers=lambda layer: (layer.first, layer.second))
call = nnx.jit(lambda stack, x: stack(x))


def test_a_stack_is_the_rule_over_its_modules():
    """On one device, and its parameters differ from layer to layer."""
    stack = residual.Stack(Pair, rngs=nnx.Rngs(0), axes=(), **SETTINGS)
    graph, params = nnx.split(stack.layers)
    layers = [nnx.merge(graph, jax.tree.map(lambda a: a[n], params)) for n in range(3)]
    assert not np.array_equal(layers[0].first.up.kernel[...], layers[1].first.up.kernel[...])
    expected = exactly("ladder", X, layers, of=SETTINGS["sublayers"])
    assert cases.error(call(stack, X), expected) < LIMIT


class Counting(nnx.Module):
    """A sublayer that changes with each call, as one with dropout or batch statistics does."""

    def __init__(self, *, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (8, 8)) / 4)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.newest = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        calls = self.calls[...]
        self.calls.set_value(calls + 1)
        self.newest.set_value(jax.lax.stop_gradient(x[0, 0, 0]))
        return jnp.tanh(x @ self.weight) * (1 + calls)


class Counts(nnx.Module):
    def __init__(self, *, rngs):
        self.attention, self.mlp = Counting(rngs=rngs), Counting(rngs=rngs)
        self.rngs = rngs  # of each layer its own


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(remat="full"),
        dict(loop="unrolled", remat="full"),
        dict(loop="unrolled"),
        dict(interleave=2),
    ],
    ids=str,
)
def test_what_sublayers_change_is_changed_in_the_stack(settings):
    """Also where a backward pass computes them again; of halves, each sublayer runs twice a call."""
    stack = residual.Stack(Counts, topology=THREE, rngs=nnx.Rngs(0), axes=(), **settings)
    call = nnx.jit(nnx.value_and_grad(lambda stack: jnp.sin(stack(jnp.asarray(X))).sum()))
    weights = stack.layers.attention.weight[...], stack.layers.mlp.weight[...]
    halves = settings.get("interleave", 1)

    def expected(calls):
        def sublayers(layer, half):
            return [lambda x, w=w[layer]: jnp.tanh(x @ w) * (1 + halves * calls + half) for w in of]

        def rows(half):
            x = jnp.split(jnp.asarray(X, jnp.float64), halves)[half]
            layers = [sublayers(layer, half) for layer in range(3)]
            return jnp.sin(exactly("ladder", x, layers, of=lambda layer: layer)).sum()

        of = [jnp.asarray(w, jnp.float64) for w in weights]
        return sum(map(rows, range(halves)))

    for calls in range(2):
        with jax.enable_x64(True):
            exact = float(expected(calls))
        # of unrolled layers jax takes each slice of the kept keys for a use
        with jax.debug_key_reuse(settings.get("loop") != "unrolled"), jax.checking_leaks():
            loss, gradients = call(stack)
        assert cases.error(loss, exact) < X.size * LIMIT
        assert np.isfinite(gradients.layers.mlp.weight[...]).all()
    assert repr(stack).startswith("Stack of Counts, 384 parameters")
    assert len(set(jax.random.key_data(stack.layers.rngs.default.key[...])[:, 0].tolist())) == 3
    for sublayer in (stack.layers.attention, stack.layers.mlp):
        assert sublayer.calls[...].tolist() == [2 * halves] * 3
    first = stack.layers.attention.newest[...]
    assert first[0] == X[-1 if halves == 2 else 0, 0, 0]
    assert len(set(first.tolist())) == 3


def test_a_stack_is_pickled():
    stack = residual.Stack(Counts, topology=THREE, rngs=nnx.Rngs(0), axes=())
    again = pickle.loads(pickle.dumps(stack))
    assert nnx.split(again)[0] == nnx.split(stack)[0]
    assert cases.error(call(again, X), call(stack, X)) == 0


def test_a_stack_that_changes_nothing_may_be_closed_over():
    """By `jax.jit`, where flax allows no change."""
    stack = residual.Stack(Pair, rngs=nnx.Rngs(0), axes=(), **SETTINGS)
    assert cases.error(jax.jit(lambda x: stack(x))(X), call(stack, X)) < LIMIT


def test_a_stacks_graph_is_a_static_argument():
    """As flax's guides have it; and a wrong setting is said where it is made."""
    make = lambda **more: residual.Stack(Pair, rngs=nnx.Rngs(0), axes=(), **SETTINGS, **more)
    of_graph = jax.jit(lambda graph, params: nnx.merge(graph, params)(X), static_argnums=0)
    first = nnx.split(make())
    second = nnx.split(make())
    assert hash(first[0]) == hash(second[0])
    assert cases.error(of_graph(*first), make()(jnp.asarray(X))) < LIMIT
    with refused("unknown value for loop: 'scann'; did you mean 'scan'"):
        make(loop="scann")


def test_compile_options_are_those_of_the_tables_traits(monkeypatch):
    """By words, for hardware that is not here: as the library's own programs of that kind are
    compiled.
    """
    monkeypatch.setattr(compiled, "_known", lambda *_: True)
    v6e = types.SimpleNamespace(device_kind="TPU v6 lite")
    shape = dict(data=1, fsdp=2, tensor=4)
    devices = np.full(tuple(shape.values()), v6e, object)
    mesh = mock.Mock(jax.sharding.Mesh, devices=devices, shape=shape)
    for name, overlap in (("ladder", Overlap.HIDES), ("standard", Overlap.WAITS)):
        topology = residual.topology(name, num_layers=2)
        traits = Traits(overlap, Phase.DECODE, Loop.UNROLLED, frozenset({Split.WEIGHTS}))
        expected = compiled.options_for(v6e.device_kind, traits)
        assert topology.compile_options(mesh, phase="decode", loop="unrolled") == expected
    assert topology.compile_options(parallel.make_mesh(), phase="train") == {}
    with refused("unknown phase 'training'; did you mean 'train'"):
        topology.compile_options(mesh, phase="training")


def test_a_scan_of_bfloat16_sublayers_and_its_gradient():
    """The stream is float32, and what is pending is not."""

    def own(x, stacked):
        steps = THREE.layers[0]
        state = residual.begin(x, topology=THREE, axes=AXES)

        def turn(state, weights):
            for step in steps:
                state = step(state, half(weights), axes=AXES)
            return state, None

        state = residual.fill(state, steps, axes=AXES, dtype=jnp.bfloat16)
        return residual.flush(jax.lax.scan(turn, state, stacked)[0], axes=AXES)

    of_library = lambda x, w: residual.run(THREE, half, x, params=w, loop="unrolled")
    found, expected = (
        on_ranks(jax.grad(lambda x, w, run=run: jnp.mean(run(x, w) ** 2)))
        for run in (own, of_library)
    )
    assert cases.error(found, expected) < HALF_LIMIT


REDUCED = {
    "psum": lambda block, x: jax.lax.psum(block.attention(x), "tensor"),
    "psum of some": lambda block, x: jax.lax.pmean(x, "tensor"),
    "a constant": lambda block, x: jnp.ones(x.shape),
}


KINDS = "standard", "ladder", "ladder-fresh", "parallel-ladder", "desync-2"


@pytest.mark.parametrize(
    "sublayer, name, tensor", covering.rows(REDUCED, KINDS, [1, 2], pairs=[(0, 2)], even=[1])
)
def test_a_sublayer_that_reduces_is_refused(sublayer, name, tensor):
    """Reduced again, it would count twice on two ranks; one rank, where a model is tried first,
    says so too.
    """

    def local(x, stacked):
        block = Block(stacked[0])
        wrong = types.SimpleNamespace(
            attention=lambda x: REDUCED[sublayer](block, x), mlp=block.mlp
        )
        return unrolled(x, [wrong], name=name)

    with refused("same on all ranks of tensor.*return this rank's partial sum, without psum"):
        on_ranks(local, tensor=tensor)


def test_where_types_are_not_checked_nothing_is_refused():
    """`check_vma=False` tracks none: what is right there stays right, and what is wrong cannot be
    told.
    """
    loop = lambda x, stacked: unrolled(x, [Block(weights) for weights in stacked])
    assert cases.error(on_ranks(loop, check_vma=False), on_ranks(loop)) < LIMIT


def test_a_bias_on_one_rank_counts_once():
    """By `on_one_rank`, on any number of ranks; added on every rank it counts once a rank."""
    topology = residual.topology("ladder", num_layers=1)

    def local(x, stacked, bias):
        def attention(x):
            return Block(stacked[0]).attention(x) + bias(jnp.ones(x.shape))

        state = residual.begin(x, topology=topology, axes=AXES)
        return residual.flush(
            topology.layers[0][0](state, (attention, attention), axes=AXES), axes=AXES
        )

    once = lambda bias: residual.on_one_rank(bias, AXES)
    one, four = (on_ranks(lambda x, w: local(x, w, once), tensor=tensor) for tensor in (1, 4))
    wrong = on_ranks(lambda x, w: local(x, w, lambda bias: bias), tensor=4)
    assert cases.error(four, one) < LIMIT
    assert cases.error(wrong, one + 3) < LIMIT
    assert (residual.on_one_rank(X, ()) == X).all()
