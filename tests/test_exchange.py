"""Experts whose rows the tensor ranks exchange: values and gradients against the dense loop in
float64, capacity with dropped rows against a loop over tokens, and what is refused.
"""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from ladder_jax import config, decode, nn, parallel, residual, train
from ladder_jax.config import ExpertParallelism, Loop, Phase, Quantize, Remat
from ladder_jax.decode import weights
from ladder_jax.errors import UserError
from ladder_jax.hardware import HARDWARE
from ladder_jax.nn import router_losses
from ladder_jax.nn.experts import MoE, NormedExperts
from ladder_jax.nn.parameter import Sizes
from ladder_jax.overlap import request as requests
from ladder_jax.parallel import exchange
from ladder_jax.residual.wires.exchange import Exchange
from ladder_jax.schedule import cost, hlo, judge, timeline
from ladder_jax.schedule.report import Status
from ladder_jax.train import metrics
from tests import cases, covering, experts, test_expert_training
from tests.hlo import SUBLAYER, parsed

# data x fsdp x tensor
MESHES = {
    "tensor-2": (1, 1, 2),
    "tensor-4": (1, 1, 4),
    "data-2-tensor-4": (2, 1, 4),
    "tensor-8": (1, 1, 8),
    "fsdp-2-tensor-4": (1, 2, 4),
    "all-2": (2, 2, 2),
}
TOPOLOGIES = [name for name in experts.TOPOLOGIES if not name.startswith("parallel")]
QUICK = [("farskip", "ungated", "fsdp-2-tensor-4", Loop.SCAN, Remat.FULL)]
ROWS = covering.array(TOPOLOGIES, experts.KINDS, MESHES, Loop, Remat)
SETTINGS = covering.marked(ROWS, chosen=QUICK)


def define(
    name: str, kind: str, *, capacity: float | None = None, axes=(1, 1, 4), **changes
) -> nn.ModelDef:
    """With a capacity that holds every row, unless given."""
    moe = experts.KINDS[kind]
    moe = {**moe, "capacity": moe["experts"] / moe["top_k"] if capacity is None else capacity}
    mesh = parallel.make_mesh(**dict(zip(("data", "fsdp", "tensor"), axes)))
    return nn.define(
        experts.model(name, kind, moe=moe, **changes), mesh=mesh, experts=ExpertParallelism.EXCHANGE
    )


@pytest.mark.parametrize("name, kind, mesh, loop, remat", SETTINGS)
def test_gradients(name, kind, mesh, loop, remat):
    """Without drops, the loss and every gradient are those of the dense loop, the routers' losses
    among them.
    """
    definition = define(name, kind, axes=MESHES[mesh])
    settings = dict(loop=loop, remat=remat, sequence_parallel=True)
    assert "all-to-all" in experts.check_gradients(
        definition, experts.dense_gradients(name, kind), **settings
    )


def loop(params, x_ND, moe, groups):
    """The sublayer over lists of tokens, each of which an expert takes so many rows of: (output
    [N, D], rows dropped).

    Differentiable: which rows are dropped is decided in NumPy, by counting.
    """
    size = min(len(groups[0]), math.ceil(moe.capacity * len(groups[0]) * moe.top_k / moe.experts))
    scores = np.asarray(x_ND, np.float64) @ np.asarray(params["router"], np.float64)
    mask, dropped = np.zeros((len(x_ND), moe.experts), np.float32), 0
    for group in groups:
        taken = np.zeros(moe.experts, int)
        for n in group:
            for e in sorted(range(moe.experts), key=lambda e: (-scores[n, e], e))[: moe.top_k]:
                mask[n, e], dropped = (1, dropped) if taken[e] < size else (2, dropped + 1)
                taken[e] += 1

    def compute(params, x_ND):
        powers = jnp.exp(x_ND @ params["router"])
        total = powers.sum(1) if moe.softmax.value == "all" else (powers * (mask > 0)).sum(1)
        out = 0
        for e in range(moe.experts):
            gate, up, down = (params["experts"][name][e] for name in ("gate", "up", "down"))
            of_expert = (jax.nn.silu(x_ND @ gate) * (x_ND @ up)) @ down
            out += of_expert * (powers[:, e] / total * (mask[:, e] == 1))[:, None]
        return out

    return compute, dropped


@pytest.mark.parametrize(
    "form",
    [ExpertParallelism.EXCHANGE, pytest.param(ExpertParallelism.REDUCE, marks=pytest.mark.full)],
)
def test_capacity(form):
    """An expert takes the first rows: of each rank's tokens where they are exchanged, otherwise of
    all.
    """
    definition = define("ladder", "routed", capacity=0.7, num_layers=1)
    moe, axes, mesh = definition.config.moe, ("tensor",), definition.layout.mesh
    params = jax.tree.map(
        lambda a: jnp.asarray(a[0]), cases.parameters(definition)["layers"]["mlp"]
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 16, 32)), jnp.float32)
    specs = jax.tree.map(
        lambda d: definition.layout.spec(d.removeprefix("L")), definition.dims["layers"]["mlp"]
    )
    graph, size = nnx.split(MoE(Sizes(definition.config, ranks=4)))[0], moe.slots(3 * 4)

    def reduced(params, x):
        seen = []
        out = nnx.merge(graph, params).routed(
            parallel.pvary(x, axes), axes=axes, on_routing=seen.append
        )
        return parallel.all_reduce(out, axes), router_losses.of_group(
            seen[0], axes=axes, own=False
        ).dropped

    def exchanged(params, x):
        seen, x = [], parallel.pvary(x, axes)
        x = jax.lax.dynamic_slice_in_dim(x, 4 * parallel.rank(axes), 4, axis=1)
        experts = dict(moe=nnx.merge(graph, params), axes=axes, on_routing=seen.append, ends_B=None)
        no_norm = types.SimpleNamespace(gain=lambda x, dtype, scale: x)
        routed = NormedExperts(None, no_norm, None, None, **experts)
        tokens, slots, weights = routed.route(x)
        rows = exchange.dispatch(
            exchange.fill(tokens, slots, experts=moe.padded(4), size=size), axes=axes
        )
        places = exchange.places(slots, experts=moe.padded(4), size=size, count=4)
        out = exchange.collect(
            exchange.combine(routed.compute(rows), axes=axes), places, weights
        ).reshape(x.shape)
        return out, router_losses.of_group(seen[0], axes=axes, own=True).dropped

    whole = PartitionSpec()
    settings = dict(mesh=mesh, in_specs=(specs, whole))
    if form is ExpertParallelism.EXCHANGE:
        order = [[b * 16 + t for b in range(3) for t in range(4 * r, 4 * r + 4)] for r in range(4)]
        call = jax.shard_map(exchanged, out_specs=(PartitionSpec(None, axes), whole), **settings)
    else:
        order = [list(range(48))]
        call = jax.shard_map(reduced, out_specs=(whole, whole), **settings)

    def of(params, x):
        out, dropped = call(params, x)
        return jnp.sum(jnp.sin(out)), (out, dropped)

    found, (out, dropped) = jax.jit(jax.grad(of, (0, 1), has_aux=True))(params, x)
    real = {**params, "experts": jax.tree.map(lambda a: a[: moe.experts], params["experts"])}
    compute, expected = loop(real, x.reshape(-1, 32), moe, order)
    assert dropped == expected and 10 < expected < 60
    limit = cases.bound(definition.config, passes=2)
    assert cases.error(out.reshape(-1, 32), compute(real, x.reshape(-1, 32))) < limit
    wanted = jax.grad(lambda params, x: jnp.sum(jnp.sin(compute(params, x))), (0, 1))(
        real, x.reshape(-1, 32)
    )
    errors = experts.errors(found[0], wanted[0])
    assert (
        max(jax.tree.leaves(errors)) < limit
        and cases.error(found[1].reshape(-1, 32), wanted[1]) < limit
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["standard", "ladder", "farskip"])
@pytest.mark.parametrize("quantize", [Quantize.NONE, Quantize.INT8])
def test_prefill(name, quantize):
    """By the program of serving: the logits of the dense loop, and the caches of the other form
    where there is text.
    """
    exchanging, reducing = define(name, "ungated"), experts.define(name, "ungated", tensor=4)
    tokens, lengths = experts.tokens()[:, :16], np.array([16, 9, 16, 1], np.int32)
    outcomes = []
    for definition, split in ((exchanging, True), (reducing, False)):
        settings = dict(loop=Loop.UNROLLED, quantize=quantize)
        params = weights.prepare(definition, cases.placed(definition), **settings)
        program = decode.prefill(definition, capacity=16, sequence_parallel=split, **settings)
        outcomes.append(program(params, tokens, lengths))
    (logits, caches), (others, of_others) = outcomes
    limit = cases.bound(exchanging.config)
    if quantize is Quantize.NONE:
        expected = experts.dense_logits(name, "ungated")[np.arange(4), lengths - 1]
        assert cases.error(logits[:, :251], expected) < limit
    assert cases.error(logits[:, :251], others[:, :251]) < limit
    text = np.arange(16) < lengths[:, None]
    real = lambda cache: np.asarray(cache)[text]
    assert (
        max(
            cases.error(real(a), real(b))
            for a, b in zip(*map(jax.tree.leaves, (caches, of_others)))
        )
        < limit
    )


def test_a_run_reports_what_it_drops(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"line {i} of a little book\n" for i in range(2000)))
    settings = [
        *test_expert_training.TINY,
        f"data.path={tmp_path / 'book.txt'}",
        f"run.dir={tmp_path / 'run'}",
        "mesh.tensor=4",
        "mesh.experts=exchange",
        "train.sequence_parallel=true",
        "model.moe.capacity=1.0",
        "train.steps=2",
        "model.residual=ladder",
    ]
    train.run(config.load("tiny-moe", overrides=settings), say=lambda line: None)
    rows = metrics.read(tmp_path / "run")
    assert len(rows) == 2 and all(0 < row["dropped_share"] < 0.5 for row in rows)


@pytest.mark.parametrize(
    "overrides, reason",
    [
        (
            [],
            "mesh.experts=exchange needs model.moe.capacity, such as 1.25: .* of which 4 drops no row",
        ),
        (["model.moe.capacity=1"], "mesh.experts=exchange needs train.sequence_parallel=true"),
        (["model.moe=null", "model.residual=ladder"], "mesh.experts=exchange needs experts"),
        (
            ["model.moe.dense_layers=1"],
            "mesh.experts=exchange needs experts in all layers, not .*dense_layers=1",
        ),
        (
            ["model.residual=parallel"],
            "not with the residual 'parallel' .allowed: standard, ladder, ladder-K, farskip",
        ),
        (["model.moe.capacity=0"], "model.moe.capacity must be positive, not 0"),
        (["mesh.experts=exchnge"], "did you mean 'exchange'"),
    ],
)
def test_refusals(overrides, reason):
    with pytest.raises(UserError, match=reason):
        config.load("tiny-moe", overrides=["mesh.experts=exchange", *overrides])


def test_a_definition_is_refused_alike():
    with pytest.raises(UserError, match="experts='exchange' needs model.moe.capacity"):
        nn.define(experts.model(), mesh=parallel.make_mesh(tensor=4), experts="exchange")


def test_too_many_rows_for_exact_places_are_refused():
    with pytest.raises(UserError, match="are too many: fewer tokens"):
        exchange.places(jnp.zeros((1, 1), jnp.int32), experts=2**12, size=2**12, count=4)


@pytest.mark.parametrize(
    "name, wide, first", [("h100-exchange", 1, True), ("tpu7x-exchange", 4, False)]
)
def test_the_report_counts_all_to_alls_apart(name, wide, first):
    """Two layers as the compilers schedule them: the last one has nothing beside it, on a TPU nor
    has the first.
    """
    one = SUBLAYER * wide
    found = judge.read(parsed(name), sublayer_flops={"attention": one, "mlp": one / 4})
    rows = [r for r in found.reductions if r.exchanges]
    assert [(r.layer, r.sublayer) for r in rows] == [
        ("0", "mlp"),
        ("0", "mlp"),
        ("1", "mlp"),
        ("last", ""),
    ]
    assert [r.status is Status.HIDDEN for r in rows] == [first, True, True, False]
    assert (found.all_to_alls, found.all_to_alls_hidden, found.merged) == (4, 2 + first, 0)
    kinds = [r.collective.kind for r in found.reductions if not r.exchanges]
    assert found.all_reduces == len(kinds) == 4 and set(kinds) == {"all-gather", "reduce-scatter"}
    assert found.verdict.endswith(f"; {2 + first} of 4 all-to-alls hidden")
    assert "input of mlp, exchanged" in repr(found)


KERNEL = """HloModule m, is_scheduled=true

ENTRY %e (q: bf16[4,8,64], k: bf16[2,8,64]) -> bf16[4,8,64] {
  %q = bf16[4,8,64]{2,1,0} parameter(0)
  %k = bf16[2,SEEN,64]{2,1,0} parameter(1)
  %blocks = s32[8,64,64]{2,1,0} parameter(2)
  ROOT %a = OUT custom-call(%blocks, %q, %k), metadata={op_name="layer_0/NAME/pallas_call"}
}
"""


@pytest.mark.parametrize(
    "name, out, seen, before, products",
    [
        ("splash_mha_fwd", "bf16[4,8,64]", 8, 0, 2),
        ("splash_mha_fwd", "bf16[4,8,64]", 24, 16, 2),
        ("splash_mha_dq_no_residuals", "bf16[4,8,64]", 8, 0, 3),
        ("splash_mha_dkv_no_residuals", "(bf16[2,8,64], bf16[2,8,64])", 8, 0, 4),
        ("other", "bf16[4,8,64]", 8, 0, 0),
    ],
)
def test_a_kernel_of_attention_is_compute(name, out, seen, before, products):
    """For each of 4 heads, 8 queries, and positions up to the query's own: 2 H in each of its
    matrix products.
    """
    program = hlo.parse(KERNEL.replace("SEEN", str(seen)).replace("NAME", name).replace("OUT", out))
    expected = 4 * sum(products * 2 * 64 * (before + t + 1) for t in range(8))
    assert cost.attention_kernel_flops(program.entry.instructions[-1]) == expected
    slow = dataclasses.replace(HARDWARE["v5p"], flops=1.0, bandwidth=1e30)
    assert timeline.play(program, hardware=slow, ranks=1)[-1].stop == pytest.approx(expected)


SERVED = dict(
    model="qwen3-30b-a3b", target="h100:8", residual="ladder", phase=Phase.PREFILL, layers=4
)


def test_requests():
    request = requests.make(**SERVED, sequence_parallel=True, experts=ExpertParallelism.EXCHANGE)
    assert request.capacity == 1.25 == request.config.moe.capacity
    assert requests.Request.from_dict(request.as_dict()) == request
    assert requests.make(**SERVED).config.moe.capacity is None


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(experts="exchange"), "--experts exchange needs --sequence-parallel"),
        (
            dict(experts="exchange", sequence_parallel=True, model="tiny"),
            "--experts exchange needs experts",
        ),
        (
            dict(experts="exchange", sequence_parallel=True, residual="parallel"),
            "not with the residual 'parallel'",
        ),
        (dict(capacity=1.5), "--capacity 1.5 is for --experts exchange"),
        (
            dict(experts="exchange", sequence_parallel=True, capacity=-1.0),
            "--capacity must be positive",
        ),
        (
            dict(experts="exchange", sequence_parallel=True, capacity=math.nan),
            "--capacity must be positive, not nan",
        ),
        (
            dict(experts="exchange", sequence_parallel=True, model="dense.yaml"),
            "not model.moe.dense_layers=1",
        ),
    ],
)
def test_requests_that_are_refused(changes, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.yaml").write_text(
        "model: {preset: tiny-moe, d_ff: 64, moe: {dense_layers: 1}}"
    )
    if "experts" in changes:
        changes = changes | {"experts": ExpertParallelism(changes["experts"])}
    with pytest.raises(UserError, match=reason):
        requests.make(**SERVED | changes)


def test_the_wire_refuses_what_is_not_reduced():
    """Also where no configuration has been checked before."""
    layers = residual.topology("desync-2", num_layers=2).layers
    with pytest.raises(UserError, match="reduces every output: not desync-n"):
        Exchange((), normalise=None, moe=config.MoEConfig()).layers(layers)
