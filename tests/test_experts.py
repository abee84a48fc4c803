"""A mixture of experts against a dense loop over experts in float64: values, gradients, and what
communicates.
"""

import dataclasses
import itertools
import re

import autograd.numpy as anp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from ladder_jax import config, nn, parallel, residual
from ladder_jax.config import Loop, ModelConfig, Remat
from ladder_jax.nn import experts as package
from ladder_jax.nn.experts import MoE
from ladder_jax.nn.parameter import Sizes
from ladder_jax.scopes import ENTER, LAUNCH, QK_NORM
from tests import (
    cases,
    communication,
    covering,
    experts,
    reference,
    test_your_layers as your_layers,
)
from tests.refusals import refused

# data x fsdp x tensor, and whether the stream is split along the sequence
MESHES = {
    "1": (1, 1, 1, False),
    "tensor-2": (1, 1, 2, False),
    "data-2-tensor-4": (2, 1, 4, False),
    "tensor-8": (1, 1, 8, False),
    "fsdp-2-tensor-4": (1, 2, 4, False),
    "fsdp-4": (1, 4, 1, False),
    "all-2": (2, 2, 2, True),
    "split-8": (1, 1, 8, True),
}
QUICK = [
    ("ladder", "routed", "data-2-tensor-4", Loop.UNROLLED, Remat.NONE, 1),
    ("farskip", "shared", "tensor-8", Loop.SCAN, Remat.SAVE_MATMULS, 1),
    ("farskip", "dense", "fsdp-2-tensor-4", Loop.UNROLLED, Remat.OFFLOAD, 1),
    ("hybrid-farskip", "ungated", "split-8", Loop.SCAN, Remat.FULL, 2),
    ("ladder-2", "all", "all-2", Loop.SCAN, Remat.NONE, 1),
]
SETTINGS = covering.marked(
    covering.array(
        experts.TOPOLOGIES, (*experts.KINDS, *experts.FIRST_DENSE), MESHES, Loop, Remat, (1, 2)
    ),
    chosen=QUICK,
)
COMMUNICATE = re.compile(r" (all-gather|reduce-scatter|all-reduce)(-start)?\(")


@pytest.mark.parametrize("name, kind, mesh, loop, remat, parts", SETTINGS)
def test_gradients(name, kind, mesh, loop, remat, parts):
    """Loss and gradients of every parameter, the routers' losses among them, which are those of the
    whole batch however it is split. Standard, ladder and farskip have two all-reduces a layer; query
    and key norms over all heads have a small gather forward and a scatter backward beside them.
    """
    data, fsdp, tensor, split = MESHES[mesh]
    definition = experts.define(name, kind, data=data, fsdp=fsdp, tensor=tensor)
    accumulate = parts if data * fsdp < 4 else 1
    text = experts.check_gradients(
        definition,
        experts.dense_gradients(name, kind),
        loop=loop,
        remat=remat,
        sequence_parallel=split,
        accumulate=accumulate,
    )
    dense_first = kind in experts.FIRST_DENSE
    if tensor == 1 or accumulate > 1 or name not in ("standard", "ladder", "farskip"):
        return
    if dense_first and name == "farskip" and loop is Loop.SCAN:  # whose layers are of more kinds
        return
    loops = 1 + dense_first
    two_a_layer = 2 * (loops if loop is Loop.SCAN else definition.config.num_layers)
    if not split:
        count = [direction for direction, *_ in communication.all_reduces(text)].count
        # One in FarSkip's first layers. A scan's last forward one may stand after the loop.
        sums = two_a_layer - (name == "farskip") * definition.config.moe.dense_layers
        assert count(ENTER) == sums
        assert count(LAUNCH) - sums in (0, loop is Loop.SCAN)
    norms = [line for line in text.splitlines() if COMMUNICATE.search(line) and QK_NORM in line]
    assert len(norms) == (two_a_layer if dense_first else 0), norms


def sublayer(router, kind="routed"):
    """(the sublayer on 4 ranks as a function, its parameters, 12 tokens, its router replaced)."""
    definition = experts.define("ladder", kind, tensor=4, num_layers=1)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: a[0], cases.parameters(definition)["layers"]["mlp"])
    x = rng.standard_normal((3, 4, 32)).astype(np.float32)
    params["router"] = router(params["router"], x)
    specs = jax.tree.map(
        lambda d: definition.layout.spec(d.removeprefix("L")), definition.dims["layers"]["mlp"]
    )
    graph = nnx.split(MoE(Sizes(definition.config, ranks=4)))[0]

    def local(params, x):
        out = nnx.merge(graph, params)(parallel.pvary(x, ("tensor",)), axes=("tensor",))
        return parallel.all_reduce(out, ("tensor",))

    in_specs, mesh = (specs, PartitionSpec()), definition.layout.mesh
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec())
    return jax.jit(mapped), params, x


def outcome(call, params, x):
    """(a sum of what the sublayer computes, its gradients by the parameters and x)."""
    summed = lambda params, x: jnp.sum(jnp.sin(call(params, x)))
    return jax.device_get(jax.value_and_grad(summed, (0, 1))(params, x))


LIMIT = cases.bound(experts.model(), passes=2)


def assert_close(found, expected):
    errors = jax.tree.map(cases.error_but_for_padding, found, expected)
    assert max(jax.tree.leaves(errors)) < LIMIT, errors


def test_no_tokens_are_no_rows():
    x = jax.ShapeDtypeStruct((2, 0, experts.model().d_model), jnp.float32)
    assert jax.eval_shape(MoE(experts.model(), rngs=nnx.Rngs(0)), x) == x


def as_drawn(router, x):
    return router


def all_to_one(router, x):
    """Such that one direction of all tokens decides: they choose the last experts."""
    x[..., 0] = 5
    scores = np.arange(router.shape[1], dtype=np.float32) / 10
    return np.concatenate([scores[None], 0 * router[1:]])


def ties(router, x):
    return 0 * router


ROUTED = covering.marked(
    itertools.product((all_to_one, ties), experts.KINDS),
    chosen=[(all_to_one, "routed"), (all_to_one, "ungated"), (ties, "shared"), (ties, "all")],
)


@pytest.mark.parametrize("router, kind", ROUTED)
def test_sublayer(router, kind):
    """Values and gradients with empty experts and all tokens with the same ones; and in ties (the
    lowest index), whose derivative is that of the chosen ones.
    """
    call, params, x = sublayer(router, kind)
    config = experts.model(kind=kind)
    shape, count = experts.shape("ladder", config), config.moe.experts
    real = {**params, "experts": jax.tree.map(lambda a: a[:count], params["experts"])}

    def dense(arrays, _, shape):
        params, x = arrays
        return anp.sin(reference.mixture(params, x[None], shape)).sum()

    expected = reference.evaluate(dense, (real, x), (), shape, gradient=True)
    assert_close(outcome(call, params, x), expected)


def test_chunks_of_tokens(monkeypatch):
    """Values and gradients are those of all tokens at once, where a chunk is smaller, and the last
    one is padded. No more rows are in memory than those of a chunk's tokens.
    """
    call, params, x = sublayer(as_drawn)
    of_all, of_chunk = (f"[{tokens * 2},32]" for tokens in (12, 5))  # two experts a token
    whole = outcome(call, params, x)
    arrays = str(jax.make_jaxpr(call)(params, x))
    assert of_all in arrays
    assert of_chunk not in arrays
    monkeypatch.setattr(package, "CHUNK", 5)
    call, *_ = sublayer(as_drawn)
    arrays = str(jax.make_jaxpr(call)(params, x))
    assert of_all not in arrays
    assert of_chunk in arrays
    assert_close(outcome(call, params, x), whole)


def test_rows_that_a_kernel_leaves_undefined_reach_nobody(monkeypatch):
    """Those behind the last group are zeros on a CPU; a kernel may leave anything there."""
    call, params, x = sublayer(as_drawn)
    expected = outcome(call, params, x)
    plain = jax.lax.ragged_dot

    def undefined(rows, weight, sizes, **settings):
        out = plain(rows, weight, sizes, **settings)
        return jnp.where((jnp.arange(len(out)) < jnp.sum(sizes))[:, None], out, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", undefined)
    found = outcome(sublayer(as_drawn)[0], params, x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_farskip_without_a_shared_expert_is_ladder():
    farskip, ladder = (
        residual.of_model(experts.model(name, "routed")) for name in ("farskip", "ladder")
    )
    assert farskip == ladder
    assert residual.of_model(experts.model("farskip", "shared")) != ladder


def three(weights):
    """A layer's attention, routed and shared experts, which are nonlinear in a rank's own part."""
    return *your_layers.pair(
        weights
    ), lambda x: jnp.sin(x @ weights[1, ..., 0]) @ weights[0, ..., 1].T


def farskip(x, stacked):
    late = 0.0
    for attention, routed, shared in map(three, stacked):
        a = attention(x - late)
        s = shared(x)
        r = routed(x)
        x, late = x + a + s + r, r
    return x


def test_farskip_of_own_layers():
    """Against the recurrence in float64, on ranks whose partial sums differ."""
    topology = residual.topology("farskip", num_layers=3)
    run = lambda of: lambda x, stacked: residual.run(topology, of, x, params=stacked)
    found = your_layers.on_ranks(run(three))
    assert cases.error(found, your_layers.float64(farskip)) < your_layers.LIMIT
    with refused("attention, routed experts, shared expert"):
        your_layers.on_ranks(run(your_layers.pair))


def test_topology_in_words():
    text = repr(residual.topology("farskip", num_layers=4, ladder_layers="2"))
    assert "8 all-reduces" in text
    assert "farskip" in text


@pytest.mark.parametrize(
    "fields, reason",
    [
        (dict(residual="farskip"), "needs experts"),
        (dict(residual="ladder-fresh", moe={}), "ranks would choose other experts"),
        (dict(residual="desync-2", moe={}), "ranks would choose other experts"),
        (dict(biases="all", moe={}), "which experts have not"),
        (dict(moe=dict(top_k=9)), "top_k=9 chooses more than model.moe.experts=8"),
        (dict(moe=dict(top_k=0)), "top_k must be positive"),
        (dict(moe=dict(shared_gate=True)), "needs a shared expert"),
        (dict(moe=dict(shared_width=-1)), "must not be negative"),
        (dict(moe=dict(dense_layers=4)), "dense_layers=4 leaves none of 4 layers experts"),
        (dict(moe=dict(dense_layers=-1)), "dense_layers must not be negative"),
        (
            dict(qk_norm="some"),
            r"unknown value for model.qk_norm: 'some' \(allowed: false, true, all-heads\)",
        ),
        (dict(moe=dict(softmax="some")), "unknown value for model.moe.softmax"),
        (dict(moe=dict(expert=3)), "did you mean 'model.moe.experts'"),
        (dict(moe=8), "model.moe must be a section"),
    ],
)
def test_refusals(fields, reason):
    with refused(reason):
        ModelConfig(**fields)


def test_presets_and_overrides():
    """An override of one field of `moe` keeps the preset's others, and none removes the experts."""
    changed = config.load(
        "tiny-moe", overrides=["model.moe.top_k=4", "model.residual=farskip"]
    ).model
    expected = dataclasses.replace(config.preset("tiny-moe").moe, top_k=4)
    assert changed.moe == expected
    assert changed.residual == "farskip"
    assert config.preset("tiny-moe", moe=dict(top_k=4)).moe == expected
    assert config.load("tiny-moe", overrides=["model.moe=null"]).model.moe is None
    assert config.model_from_dict(config.to_dict(changed)) == changed
    norms = [], ["model.qk_norm=false"], ["model.qk_norm=true"]
    olmoe = [config.load("olmoe-1b-7b", overrides=more).model for more in norms]
    assert [config.to_dict(one)["qk_norm"] for one in olmoe] == ["all-heads", False, True]
    assert [bool(one.qk_norm) for one in olmoe] == [True, False, True]
    assert config.model_from_dict(config.to_dict(olmoe[0])) == olmoe[0]
    three = config.preset("tiny-moe", num_heads=6, head_dim=16, num_kv_heads=3)
    with refused("shared_width=128 is not divisible by mesh.tensor=3"):
        config.check_fits_mesh(three, config.MeshConfig(tensor=3))


def test_initial_values_of_an_expert():
    """N(0, 0.02); of the matrix that writes to the stream, N(0, 0.02 / sqrt(2L)), L = 3."""
    values = nn.initialize(experts.define("ladder"))["layers"]["mlp"]["experts"]
    for name, deviation in dict(gate=0.02, up=0.02, down=0.02 / 6**0.5).items():
        values_of = np.asarray(values[name])
        # The deviation of n normal values is off by a share of about 1 / sqrt(2 n).
        assert abs(values_of.std() / deviation - 1) < 5 / (2 * values_of.size) ** 0.5, name
