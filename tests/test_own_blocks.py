"""`residual` around sublayers of somebody else's: a scan over them, and one line for those that communicate."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel, residual
from ladder_jax.config import RESIDUALS, Loop
from ladder_jax.errors import UserError
from ladder_jax.residual import anneal, sequence
from tests import cases
from tests.test_residual import UNROLLED, example

SCANNED = residual.__doc__.split("`stacked`, their parameters [L, ...]:\n\n")[1].split("\nWhat a compiler")[0]
AXES, EQUAL = ("tensor",), P()
X = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
STACKED = np.random.default_rng(1).standard_normal((3, 2, 8, 16, 2)).astype(np.float32) / 4  # L, sublayer, D, F, in/out
LIMIT = 6 * 4 * 4 * cases.UNIT_ROUNDOFF  # of six sublayers, each two contractions of 16 at most, in float32


class Block:
    """A layer of `STACKED`: two sublayers of two matmuls, whose hidden dimension is split."""

    def __init__(self, weights):
        self._weights = weights

    def attention(self, x):
        return jnp.tanh(x @ self._weights[0, ..., 0]) @ self._weights[0, ..., 1].T

    def mlp(self, x):
        return jax.nn.relu(x @ self._weights[1, ..., 0]) @ self._weights[1, ..., 1].T


def on_ranks(local, *, tensor=2, out=EQUAL, check_vma=True):
    """`local` of the stream and each rank's slice of STACKED, compiled."""
    mesh, specs = parallel.make_mesh(tensor=tensor), (P(), P(None, None, None, "tensor", None))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma))(X, STACKED)


def unrolled(x, blocks, *, name="ladder"):
    return example(UNROLLED.replace('"ladder"', repr(name)), residual=residual, x=x, blocks=blocks)


@pytest.mark.parametrize("name", RESIDUALS)
def test_the_docstrings_scan_is_the_docstrings_loop(name):
    topology = residual.topology(name, num_layers=3)
    assert len(set(topology.layers)) == 1
    out = P("tensor") if name == "no-communication" else EQUAL
    scope = dict(residual=residual, topology=topology, jax=jax, Block=Block)
    scan = lambda x, stacked: example(SCANNED, x=x, stacked=stacked, **scope)
    loop = lambda x, stacked: unrolled(x, [Block(weights) for weights in stacked], name=name)
    assert cases.error(on_ranks(scan, out=out), on_ranks(loop, out=out)) < LIMIT


def test_a_scan_of_bfloat16_sublayers_and_its_gradient():
    """The stream is float32, and what is pending is not."""
    topology = residual.topology("ladder", num_layers=3)

    def loss(x, stacked, loop):
        steps, state = topology.layers[0], residual.begin(x, topology=topology, axes=AXES)

        def turn(state, weights):
            block = Block(weights.astype(jnp.bfloat16))
            pair = [lambda x, f=f: f(x.astype(jnp.bfloat16)) for f in (block.attention, block.mlp)]
            for step in steps:
                state = step(state, pair, axes=AXES)
            return state, None

        if loop is Loop.SCAN:
            state, _ = jax.lax.scan(turn, residual.fill(state, steps, axes=AXES, dtype=jnp.bfloat16), stacked)
        else:
            for weights in stacked:
                state, _ = turn(state, weights)
        return jnp.mean(residual.flush(state, axes=AXES) ** 2)

    scan, loop = (on_ranks(jax.grad(lambda x, w, form=form: loss(x, w, form))) for form in (Loop.SCAN, Loop.UNROLLED))
    assert cases.error(scan, loop) < LIMIT / cases.UNIT_ROUNDOFF * 2.0**-8  # bfloat16's


REDUCED = {
    "psum": lambda block, x: jax.lax.psum(block.attention(x), "tensor"),
    "psum of some": lambda block, x: jax.lax.pmean(x, "tensor"),
    "a constant": lambda block, x: jnp.ones(x.shape),
}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", ["standard", "ladder", "ladder-fresh", "parallel-ladder", "desync-2"])
@pytest.mark.parametrize("sublayer", REDUCED.values(), ids=REDUCED)
def test_a_sublayer_that_reduces_is_refused(sublayer, name, tensor):
    """Reduced again, it would count twice on two ranks; one rank, where a model is tried first, says so too."""

    def local(x, stacked):
        block = Block(stacked[0])
        wrong = types.SimpleNamespace(attention=lambda x: sublayer(block, x), mlp=block.mlp)
        return unrolled(x, [wrong], name=name)

    with pytest.raises(UserError, match="same on all ranks of tensor.*return this rank's partial sum, without psum"):
        on_ranks(local, tensor=tensor)


def test_split_and_turning_steps_refuse_it_too():
    whole = lambda x: jax.lax.psum(x, "tensor")
    ladder = residual.topology("ladder", num_layers=1)
    split = sequence.layers(ladder, normalise=lambda x: x)[0]
    turning = anneal.steps(ladder.layers[0], ladder_fraction=jnp.float32(0.5))
    share = lambda x: sequence.scatter_sequence(parallel.pvary(x, AXES), AXES)
    for step, start in ((split[0], share), (turning[0], lambda x: x)):
        begin = lambda x, start=start: residual.begin(start(x), topology=ladder, axes=AXES)
        with pytest.raises(UserError, match="same on all ranks of tensor"):
            on_ranks(lambda x, _, step=step, begin=begin: step(begin(x), (whole, whole), axes=AXES).residual)


def test_where_types_are_not_checked_nothing_is_refused():
    """`check_vma=False` tracks none: what is right there stays right, and what is wrong cannot be told."""
    loop = lambda x, stacked: unrolled(x, [Block(weights) for weights in stacked])
    assert cases.error(on_ranks(loop, check_vma=False), on_ranks(loop)) < LIMIT


def test_a_bias_on_one_rank_counts_once():
    """By the docstring's line, on any number of ranks; added on every rank it counts once a rank."""
    line = next(line for line in residual.__doc__.splitlines() if line.startswith("    bias = "))
    topology = residual.topology("ladder", num_layers=1)

    def local(x, stacked, by):
        def attention(x):
            scope = dict(jax=jax, jnp=jnp, bias=jnp.ones(x.shape))
            exec(by, scope)  # noqa: S102
            return Block(stacked[0]).attention(x) + scope["bias"]

        state = residual.begin(x, topology=topology, axes=AXES)
        return residual.flush(topology.layers[0][0](state, (attention, attention), axes=AXES), axes=AXES)

    one, four = (on_ranks(lambda x, w: local(x, w, line.strip()), tensor=tensor) for tensor in (1, 4))
    assert cases.error(four, one) < LIMIT
    assert cases.error(on_ranks(lambda x, w: local(x, w, "pass"), tensor=4), one + 3) < LIMIT


def test_axes_that_are_none():
    topology = residual.topology("ladder", num_layers=1)
    begin = lambda axes: lambda x, _: residual.begin(x, topology=topology, axes=axes).residual
    step = lambda axes: lambda x, _: topology.layers[0][0](residual.State(x), (jnp.sin,), axes=axes).residual
    for call in (begin, step):
        with pytest.raises(
            UserError, match=r"axes must be a tuple of the mesh's axes, as in \('tensor',\), not 'tensor'"
        ):
            on_ranks(call("tensor"))
        with pytest.raises(UserError, match="unknown mesh axis 'tensr'; did you mean 'tensor'"):
            on_ranks(call(("tensr",)))
        with pytest.raises(UserError, match="no ranks of 'tensor' here: call it inside jax.shard_map"):
            call(AXES)(jnp.asarray(X), None)
    assert begin(())(jnp.asarray(X), None).shape == X.shape  # one rank, without a mesh
