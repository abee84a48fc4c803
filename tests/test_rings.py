"""Collective matmuls: a ring by itself, and in the library's programs, against dense references."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import nn
from ladder_jax.config import Biases, CollectiveMatmul, Execution, Loop, Quantize, Remat
from ladder_jax.nn import quantized
from ladder_jax.parallel import ring
from tests import cases, covering
from tests.refusals import refused

AXES = ("tensor",)
ROWS = 2
CHUNK = 3
D = 8
F = 6


def over(ranks, function, *specs):
    mesh = jax.make_mesh(
        (ranks,), AXES, (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks]
    )
    *ins, out = specs
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(ins), out_specs=out)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(actual, expected, *, terms):
    """To what float32 sums of so many terms may lose."""
    assert cases.error(actual, expected) < 4 * terms**0.5 * cases.UNIT_ROUNDOFF


SPLIT = P(None, "tensor")  # positions
ROW = P("tensor")  # one array a rank
MATRICES = functools.partial(quantized.products, ("BTD,DF->BTF", "BTD,DF->BTF"))


RANKS = [2, 3, 8, *map(covering.full, (1, 5))]


@pytest.mark.parametrize("ranks", RANKS)
def test_a_ring_is_a_gather_and_a_product(ranks):
    """And backward a product and a scatter; with any number of ranks. By hand, in NumPy."""
    x = draw(ROWS, ranks * CHUNK, D)
    w = draw(2, ranks, D, F, seed=1)
    g = draw(2, ranks, ROWS, ranks * CHUNK, F, seed=2)

    def local(x, w, g):
        value, pull_back = jax.vjp(
            lambda x, w: ring.gather_product(MATRICES, x, w, AXES), x, tuple(w[:, 0])
        )
        of_x, of_w = pull_back(tuple(g[:, 0]))
        return jnp.stack(value)[:, None], of_x, jnp.stack(of_w)[:, None]

    each = P(None, "tensor")
    value, of_x, of_w = jax.jit(over(ranks, local, SPLIT, each, each, (each, SPLIT, each)))(x, w, g)
    close(value, np.einsum("btd,mrdf->mrbtf", x, w), terms=D)
    close(of_x, np.einsum("mrbtf,mrdf->btd", g, w), terms=2 * ranks * F)
    close(of_w, np.einsum("btd,mrbtf->mrdf", x, g), terms=ROWS * ranks * CHUNK)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_ring_is_a_product_and_a_scatter(ranks):
    x = draw(ranks, ROWS, ranks * CHUNK, F)
    w = draw(ranks, F, D, seed=1)
    g = draw(ROWS, ranks * CHUNK, D, seed=2)
    bias = draw(ranks, D, seed=3)
    biased = functools.partial(quantized.biased, "BTF,FD->BTD")

    def local(x, w, bias, g):
        product = lambda x, w, bias: ring.scatter_product(biased, x, (w, bias), AXES)
        value, pull_back = jax.vjp(product, x[0], w[0], bias[0])
        return value, *(a[None] for a in pull_back(g))

    value, of_x, of_w, of_bias = jax.jit(
        over(ranks, local, ROW, ROW, ROW, SPLIT, (SPLIT, ROW, ROW, ROW))
    )(x, w, bias, g)
    close(value, np.einsum("rbtf,rfd->btd", x, w) + bias.sum(0), terms=ranks * F)
    close(of_x, np.einsum("btd,rfd->rbtf", g, w), terms=D)
    close(of_w, np.einsum("rbtf,btd->rfd", x, g), terms=ROWS * ranks * CHUNK)
    close(of_bias, np.broadcast_to(g.sum((0, 1)), bias.shape), terms=ROWS * ranks * CHUNK)


def permutes(function, *args):
    """How many there are; and nothing else communicates."""
    text = str(jax.make_jaxpr(function)(*args))
    assert not any(
        f" {other}[" in text for other in ("all_gather", "reduce_scatter", "psum", "all_to_all")
    )
    return text.count(" ppermute[")


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_a_ring_sends_each_chunk_once(ranks):
    """One ring feeds several matrices; backward there are two: one gathers for the weights, one for
    the input.
    """
    x = draw(ROWS, ranks * CHUNK, D)
    w = (draw(ranks * D, F), draw(ranks * D, F))
    product = lambda x, w: ring.gather_product(MATRICES, x, w, AXES)
    forward = over(ranks, product, SPLIT, (ROW, ROW), (P(None, None, "tensor"),) * 2)
    assert permutes(forward, x, w) == ranks - 1

    def both(x, w):
        value, pull_back = jax.vjp(product, x, w)
        return pull_back(value)

    assert permutes(over(ranks, both, SPLIT, (ROW, ROW), (SPLIT, (ROW, ROW))), x, w) == 3 * (
        ranks - 1
    )


NAMES = "standard", "ladder", "ladder-2", "ladder-fresh", "hybrid-delay-2"
TOKENS = cases.tokens((4, 9))  # 8 positions, over 1 to 8 ranks
SETTINGS = itertools.product(NAMES, (1, 2, 4, 8), Loop, Remat)
CHOSEN = [
    ("standard", 8, Loop.SCAN, Remat.FULL),  # ranks share key/value heads
    ("ladder", 2, Loop.UNROLLED, Remat.SAVE_MATMULS),
    ("ladder-fresh", 4, Loop.SCAN, Remat.NONE),
]


@pytest.mark.parametrize("name, tensor, loop, remat", covering.marked(SETTINGS, chosen=CHOSEN))
def test_gradients_are_the_references(name, tensor, loop, remat):
    layers = 4 if name.startswith("hybrid") else 2
    cases.check_case(
        name,
        dict(tensor=tensor, num_layers=layers, biases=Biases.ALL),
        shape_BT=(4, 9),
        loop=loop,
        remat=remat,
        sequence_parallel=True,
        collective_matmul=CollectiveMatmul.RING,
    )


@pytest.mark.parametrize("quantize", [Quantize.INT8, covering.full(Quantize.NONE)])
def test_a_prefill_in_rings_is_the_plain_one(quantize):
    """Of int8 with the scales, too; and so is one whose stream is split without them."""
    definition = cases.define("standard", tensor=4, num_layers=2)
    settings = dict(loop=Loop.UNROLLED, quantize=quantize)
    split = dict(sequence_parallel=True)
    plain, *others = (
        cases.prefilled(definition, TOKENS[:, :8], [8] * 4, **form, **settings)
        for form in ({}, split, dict(collective_matmul=CollectiveMatmul.RING, **split))
    )
    for found in others:
        assert max(map(cases.error, found, plain)) < cases.bound(definition.config)


def test_forms_that_cannot_be():
    definition = cases.define("standard", tensor=2)
    with refused("collective_matmul=ring needs sequence_parallel"):
        nn.hidden(
            definition, {}, TOKENS, execution=Execution(collective_matmul=CollectiveMatmul.RING)
        )
    shared = cases.define("parallel", tensor=2)
    with refused("attention and MLP of parallel share one gather"):
        split = Execution(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
        nn.hidden(shared, {}, TOKENS, execution=split)
