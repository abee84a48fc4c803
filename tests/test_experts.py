"""A mixture of experts against a dense loop over experts in float64: values, gradients, and what
communicates.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from ladder_jax import config, nn, parallel, residual, train
from ladder_jax.config import Loop, ModelConfig, Remat
from ladder_jax.errors import UserError
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
    rounding,
    test_gradients_bfloat16,
)

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
    ("farskip", "dense", "fsdp-2-tensor-4", Loop.UNROLLED, Remat.OFFLOAD, 2),
    ("hybrid-farskip", "ungated", "split-8", Loop.SCAN, Remat.FULL, 1),
    ("ladder-2", "all", "all-2", Loop.SCAN, Remat.NONE, 2),
]
SETTINGS = covering.marked(
    covering.array(
        experts.TOPOLOGIES, (*experts.KINDS, *experts.FIRST_DENSE), MESHES, Loop, Remat, (1, 2)
    ),
    chosen=QUICK,
)


@pytest.mark.parametrize("name, kind, mesh, loop, remat, parts", SETTINGS)
def test_gradients(name, kind, mesh, loop, remat, parts):
    """Loss and gradients of every parameter, the routers' losses among them, which are those of the
    whole batch however it is split; and that standard, ladder and farskip have two all-reduces a
    layer.
    """
    data, fsdp, tensor, split = MESHES[mesh]
    definition = experts.define(name, kind, data=data, fsdp=fsdp, tensor=tensor)
    settings = dict(
        loop=loop, remat=remat, sequence_parallel=split, accumulate=parts if data * fsdp < 4 else 1
    )
    text = experts.check_gradients(definition, experts.dense_gradients(name, kind), **settings)
    counted = tensor > 1 and not split and settings["accumulate"] == 1
    # one loop
    if counted and kind not in experts.FIRST_DENSE and name in ("standard", "ladder", "farskip"):
        found = [direction for direction, *_ in communication.all_reduces(text)]
        a_layer = 2 if loop is Loop.SCAN else 2 * definition.config.num_layers
        # A scan's last forward one may stand after the loop.
        assert found.count(ENTER) == a_layer and found.count(LAUNCH) - a_layer in (
            0,
            loop is Loop.SCAN,
        )


DENSE_FIRST = covering.marked(
    covering.array(
        (
            "standard",
            "ladder",
            "farskip",
            "hybrid-farskip",
            "farskip-first",
            "ladder-2",
            "parallel",
        ),
        ("shared", "routed"),
        (1, 2),
        MESHES,
        Loop,
        Remat,
        pairs=[(0, 2), (0, 4), (2, 3), (3, 4)],
        even=[0, 1, 5],
    ),
    chosen=[],
)


@pytest.mark.parametrize("name, kind, dense, mesh, loop, remat", DENSE_FIRST)
def test_dense_layers_first(name, kind, dense, mesh, loop, remat):
    """Values and gradients where the first layers have no experts: a stack of parameters of their
    own.
    """
    data, fsdp, tensor, split = MESHES[mesh]
    definition = experts.define(name, kind, data=data, fsdp=fsdp, tensor=tensor, dense_layers=dense)
    assert definition.abstract.keys() == {"embedding", "dense", "layers", "final_norm", "head"}
    expected = experts.dense_gradients(name, kind, dense)
    experts.check_gradients(definition, expected, loop=loop, remat=remat, sequence_parallel=split)


NORMS = covering.marked(
    covering.array(
        ("standard", "ladder", "farskip"), MESHES, Loop, Remat, pairs=[(1, 2), (0, 2)], even=[0, 3]
    ),
    chosen=[],
)


@functools.cache
def dense_gradients_with_all_heads(name: str):
    definition = experts.define(name, **experts.ALL_HEADS)
    shape = experts.shape(name, definition.config)
    return reference.evaluate(
        experts.loss, cases.parameters(definition), experts.tokens(), shape, gradient=True
    )


@pytest.mark.parametrize("name, mesh, loop, remat", NORMS)
def test_query_and_key_norms_over_all_heads(name, mesh, loop, remat):
    """Values and gradients, and what they communicate: a small gather forward, a scatter backward,
    beside the two.
    """
    data, fsdp, tensor, split = MESHES[mesh]
    definition = experts.define(name, data=data, fsdp=fsdp, tensor=tensor, **experts.ALL_HEADS)
    expected = dense_gradients_with_all_heads(name)
    text = experts.check_gradients(
        definition, expected, loop=loop, remat=remat, sequence_parallel=split
    )
    if tensor > 1:
        communicate = re.compile(r" (all-gather|reduce-scatter|all-reduce)(-start)?\(")
        norms = [line for line in text.splitlines() if communicate.search(line) and QK_NORM in line]
        bodies = 1 if loop is Loop.SCAN else definition.config.num_layers
        assert len(norms) == 2 * bodies, norms
    if tensor > 1 and not split:
        count = [direction for direction, *_ in communication.all_reduces(text)]
        assert count.count(ENTER) == 2 * bodies and count.count(LAUNCH) - 2 * bodies in (
            0,
            loop is Loop.SCAN,
        )


@pytest.mark.parametrize("name", ["standard", "ladder", "farskip"])
def test_two_all_reduces_a_layer(name):
    definition = experts.define(name, tensor=4, num_kv_heads=4)
    params = cases.placed(definition)
    program = (
        nn.compiled_logits(definition, loop=Loop.UNROLLED).lower(params, experts.tokens()).compile()
    )
    found = communication.all_reduces(program.as_text())
    assert len(found) == 2 * definition.config.num_layers
    assert all(
        direction == LAUNCH and operands == 1 and tensor for direction, _, operands, tensor in found
    )
    assert cases.error(
        program(params, experts.tokens()), experts.dense_logits(name, "shared")
    ) < cases.bound(definition.config)


def dense(params, x, moe):
    """The sublayer in NumPy, float64, token by token: [N, D] to [N, D]."""
    params, out = jax.tree.map(lambda a: np.asarray(a, np.float64), params), np.zeros(x.shape)
    swiglu = lambda x, gate, up, down: (x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)) @ down
    for n, token in enumerate(np.asarray(x, np.float64)):
        scores = token @ params["router"]
        powers = np.exp(scores)
        for_choice = powers / powers.sum() + params["router_bias"] if moe.router_bias else scores
        chosen = sorted(range(moe.experts), key=lambda c: (-for_choice[c], c))[: moe.top_k]
        total = powers.sum() if moe.softmax.value == "all" else powers[chosen].sum()
        for e in chosen:
            matrices = (params["experts"][name][e] for name in ("gate", "up", "down"))
            out[n] += powers[e] / total * swiglu(token, *matrices)
        if "shared" in params:
            shared = swiglu(token, *(params["shared"][name] for name in ("gate", "up", "down")))
            share = 1 / (1 + np.exp(-token @ params["shared"]["share"])) if moe.shared_gate else 1
            out[n] += shared * share
    return out


def sublayer(router, kind: str = "routed", **changes):
    """(the sublayer on 4 ranks as a function, its parameters, its settings, 12 tokens, its router
    replaced).
    """
    definition = experts.define("ladder", kind, tensor=4, num_layers=1, **changes)
    moe, rng = definition.config.moe, np.random.default_rng(0)
    params = jax.tree.map(lambda a: a[0], cases.parameters(definition)["layers"]["mlp"])
    x = rng.standard_normal((3, 4, 32)).astype(np.float32)
    params["router"] = router(params["router"], moe, x)
    specs = jax.tree.map(
        lambda d: definition.layout.spec(d.removeprefix("L")), definition.dims["layers"]["mlp"]
    )
    graph = nnx.split(MoE(Sizes(definition.config, ranks=4)))[0]

    def local(params, x):
        out = nnx.merge(graph, params)(parallel.pvary(x, ("tensor",)), axes=("tensor",))
        return parallel.all_reduce(out, ("tensor",))

    mesh = definition.layout.mesh
    call = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec()
        )
    )
    return call, params, moe, x


def as_drawn(router, moe, x):
    return router


def all_to_one(router, moe, x):
    """Such that one direction of all tokens decides: they choose the last experts."""
    x[..., 0] = 5
    return np.concatenate([np.arange(moe.experts, dtype=np.float32)[None], 0 * router[1:]])


def ties(router, moe, x):
    return 0 * router


@pytest.mark.parametrize("kind", experts.KINDS)
@pytest.mark.parametrize("router", [as_drawn, all_to_one, ties])
def test_sublayer(router, kind):
    """Empty experts, all tokens with the same ones, ties (the lowest index), as many chosen as
    there are.
    """
    call, params, moe, x = sublayer(router, kind)
    real = {**params, "experts": jax.tree.map(lambda a: a[: moe.experts], params["experts"])}
    expected = dense(real, x.reshape(-1, 32), moe).reshape(x.shape)
    assert cases.error(call(params, x), expected) < cases.bound(experts.model(kind=kind))


@pytest.mark.parametrize(
    "router, moe",
    [
        (all_to_one, dict(experts=6, top_k=1, expert_width=16, softmax="all")),
        (ties, dict(experts=6, top_k=2, expert_width=16, softmax="all")),
    ],
    ids=["all to one", "ties"],
)
def test_gradients_of_a_sublayer(router, moe):
    """All tokens to one expert, the others empty; and ties, whose derivative is that of the chosen
    ones.
    """
    call, params, moe, x = sublayer(router, "routed", moe=moe)
    found = jax.device_get(
        jax.grad(lambda params, x: jnp.sum(jnp.sin(call(params, x))), (0, 1))(params, x)
    )
    scores = x.reshape(-1, 32).astype(np.float64) @ params["router"].astype(np.float64)
    chosen = np.argsort(-scores, axis=1, kind="stable")[:, : moe.top_k]

    def dense(params, x):
        swiglu = lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down
        matrices = [params["experts"][name] for name in ("gate", "up", "down")]
        weights = jax.nn.softmax(x.reshape(-1, 32) @ params["router"])
        outputs = jnp.stack(
            [swiglu(x.reshape(-1, 32), *(m[e] for m in matrices)) for e in range(moe.experts)]
        )
        passed = (np.arange(moe.experts)[:, None, None] == chosen).any(-1)
        return jnp.sum(
            jnp.sin(
                jnp.sum(jnp.where(passed[:, :, None], weights.T[:, :, None] * outputs, 0), axis=0)
            )
        )

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        expected = jax.tree.map(np.asarray, jax.grad(dense, (0, 1))(*wide))
    empty = np.setdiff1d(np.arange(moe.experts), chosen)
    assert len(empty) and not any(np.any(a[empty]) for a in found[0]["experts"].values())
    errors = jax.tree.map(cases.error, found, expected)
    assert max(jax.tree.leaves(errors)) < cases.bound(experts.model(), passes=2), errors


def test_chunks_of_tokens(monkeypatch):
    """Values and gradients are those of all tokens at once, where a chunk is smaller, and the last
    one is padded. No more rows are in memory than those of a chunk's tokens.
    """
    call, params, moe, x = sublayer(as_drawn)

    def outcome():
        compute = lambda params, x: jnp.sum(jnp.sin(call(params, x)))
        return jax.device_get(jax.value_and_grad(compute, (0, 1))(params, x))

    of_all, of_chunk = (f"[{tokens * moe.top_k},32]" for tokens in (12, 5))
    whole, arrays = outcome(), str(jax.make_jaxpr(call)(params, x))
    assert of_all in arrays and of_chunk not in arrays
    monkeypatch.setattr(package, "CHUNK", 5)
    call, *_ = sublayer(as_drawn)
    arrays = str(jax.make_jaxpr(call)(params, x))
    assert of_all not in arrays and of_chunk in arrays
    errors = jax.tree.map(cases.error, outcome(), whole)
    assert max(jax.tree.leaves(errors)) < cases.bound(experts.model(), passes=2)


def test_rows_that_a_kernel_leaves_undefined_reach_nobody(monkeypatch):
    """Those behind the last group are zeros on a CPU; a kernel may leave anything there."""
    call, params, _, x = sublayer(as_drawn)

    def outcome(call):
        compute = lambda params, x: jnp.sum(jnp.sin(call(params, x)))
        return jax.device_get(jax.value_and_grad(compute, (0, 1))(params, x))

    expected, plain = outcome(call), jax.lax.ragged_dot

    def undefined(rows, weight, sizes, **settings):
        out = plain(rows, weight, sizes, **settings)
        return jnp.where((jnp.arange(len(out)) < jnp.sum(sizes))[:, None], out, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_dot", undefined)
    jax.tree.map(np.testing.assert_array_equal, outcome(sublayer(as_drawn)[0]), expected)


def test_a_token_does_not_depend_on_the_others():
    call, params, _, x = sublayer(as_drawn, "shared")
    whole, alone = (
        np.asarray(call(params, x)),
        np.concatenate([call(params, row[None]) for row in x]),
    )
    assert cases.error(alone, whole) < cases.bound(experts.model())


def test_farskip_without_a_shared_expert_is_ladder():
    farskip, ladder = (
        residual.of_model(experts.model(name, "routed")) for name in ("farskip", "ladder")
    )
    assert farskip == ladder
    assert residual.of_model(experts.model("farskip", "shared")) != ladder


def test_farskip_of_own_layers():
    """Against the recurrence in NumPy, on ranks whose partial sums differ."""
    ranks, layers = 4, 3
    rng = np.random.default_rng(0)
    params = rng.standard_normal((layers, 3, ranks, 8, 8)).astype(np.float32) / 8
    x = rng.standard_normal((2, 4, 8)).astype(np.float32)
    topology = residual.topology("farskip", num_layers=layers)

    def local(params, x):
        blocks = lambda layer: [lambda x, w=layer[i, 0]: jnp.tanh(x @ w) for i in range(3)]
        return residual.run(topology, blocks, x, params=params)

    spec = PartitionSpec(None, None, "tensor")
    mesh = parallel.make_mesh(tensor=ranks)
    found = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())
    )
    stream, late = x.astype(np.float64), 0
    for attention, routed, shared in params.astype(np.float64):
        of = lambda weights, x: np.tanh(x @ weights).sum(0)
        a, r, s = (
            of(attention[:, None], stream - late),
            of(routed[:, None], stream),
            of(shared[:, None], stream),
        )
        stream, late = stream + a + s + r, r
    assert cases.error(found(params, x), stream) < cases.bound(
        ModelConfig(d_model=8, num_heads=4, num_layers=layers)
    )
    with pytest.raises(UserError, match="attention, routed experts, shared expert"):
        two = lambda params, x: residual.run(
            topology, lambda layer: [lambda x: x] * 2, x, params=params
        )
        jax.shard_map(two, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=PartitionSpec())(
            params, x
        )


def test_topology_in_words():
    text = repr(residual.topology("farskip", num_layers=4, ladder_layers="2"))
    assert "8 all-reduces" in text and "with the shared expert's" in text


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
    with pytest.raises(UserError, match=reason):
        ModelConfig(**fields)


def test_presets_and_overrides():
    """An override of one field of `moe` keeps the preset's others, and none removes the experts."""
    changed = config.load(
        "tiny-moe", overrides=["model.moe.top_k=4", "model.residual=farskip"]
    ).model
    expected = dataclasses.replace(config.preset("tiny-moe").moe, top_k=4)
    assert changed.moe == expected and changed.residual == "farskip"
    assert config.preset("tiny-moe", moe=dict(top_k=4)).moe == expected
    assert config.load("tiny-moe", overrides=["model.moe=null"]).model.moe is None
    assert config.model_from_dict(config.to_dict(changed)) == changed
    norms = [
        config.load("olmoe-1b-7b", overrides=[f"model.qk_norm={text}"]).model
        for text in ("true", "false")
    ]
    olmoe = config.preset("olmoe-1b-7b")
    assert [config.to_dict(one)["qk_norm"] for one in (*norms, olmoe)] == [True, False, "all-heads"]
    assert (
        olmoe.qk_norm
        and not norms[1].qk_norm
        and config.model_from_dict(config.to_dict(olmoe)) == olmoe
    )
    with pytest.raises(
        UserError, match="model.moe.shared_width=128 is not divisible by mesh.tensor=3"
    ):
        three = config.preset("tiny-moe", num_heads=6, head_dim=16, num_kv_heads=3)
        config.check_fits_mesh(three, config.MeshConfig(tensor=3))


def test_initial_values_of_an_expert():
    """N(0, 0.02); of the matrix that writes to the stream, N(0, 0.02 / sqrt(2L)), L = 3."""
    values = nn.initialize(experts.define("ladder"))["layers"]["mlp"]["experts"]
    for name, deviation in dict(gate=0.02, up=0.02, down=0.02 / 6**0.5).items():
        values_of = np.asarray(values[name])
        # The deviation of n normal values is off by a share of about 1 / sqrt(2 n).
        assert abs(values_of.std() / deviation - 1) < 5 / (2 * values_of.size) ** 0.5, name


@pytest.mark.full
def test_bfloat16_gradients_are_within_what_rounding_may_do():
    """By tests/rounding.py, of whole arrays. Near ties turn out otherwise in its samples, too; in a
    table's row, of few tokens, whether one of them passes another expert would be no sum of
    roundings.
    """
    bfloat16 = dict(
        dtype="bfloat16", residual_dtype="bfloat16", num_layers=2, num_heads=4, num_kv_heads=2
    )
    moe = dict(experts=4, top_k=2, expert_width=16, shared_width=16, shared_gate=True)
    definition = experts.define("farskip", moe=moe, **bfloat16)
    params, batch = cases.parameters(definition), cases.tokens((32, 65))
    shape = experts.shape("farskip", definition.config)
    exact, samples = rounding.gradients(params, batch, shape, parts=1)
    compute = train.loss_and_gradients(definition, load_balance=0.0, router_z_loss=0.0)
    _, found = jax.jit(compute)(cases.place(params, definition), batch)
    measured = test_gradients_bfloat16.ratios(jax.tree.map(np.asarray, found), exact, samples)
    measured = {name: value for name, value in measured.items() if " row " not in name}
    beyond = {name: value for name, value in measured.items() if not value < rounding.STUDENT}
    assert not beyond and len(measured) > 14, beyond


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_an_experts_gradient_is_rounded_once_at_most(stored):
    """A sum over 16,384 rows is added in float32, whose errors are no more than 2^14 2^-24 of what
    is added.
    """
    rng, sizes = np.random.default_rng(0), [9000, 0, 5000, 1000]
    rows, dy = (jnp.asarray(rng.standard_normal((16384, n)) + 0.5, jnp.bfloat16) for n in (16, 24))
    places = jnp.arange(16384)
    groups = package.Groups(places, places, jnp.array(sizes, jnp.int32))
    _, pull_back = jax.vjp(
        lambda w: package.grouped_matmul(rows, w, groups), jnp.ones((4, 16, 24), stored)
    )
    found = np.asarray(jax.jit(pull_back)(dy)[0], np.float64)
    wide, start = np.asarray(rows, np.float64), 0
    for expert, size in enumerate(sizes):
        part = slice(start, start := start + size)
        wanted = wide[part].T @ np.asarray(dy, np.float64)[part]
        added = np.linalg.norm(np.abs(wide[part]).T @ np.abs(np.asarray(dy, np.float64)[part]))
        error = np.linalg.norm(found[expert] - wanted)
        assert error <= 2.0**-10 * added + 2.0**-8 * np.linalg.norm(wanted)  # and once to bfloat16
