"""Experts whose rows the tensor ranks exchange: values and gradients against the dense loop in
float64, capacity with dropped rows against a loop over tokens, and what is refused.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import config, residual, train
from ladder_jax.config import ExpertParallelism, Loop, Phase, Quantize, Remat
from ladder_jax.hardware import HARDWARE
from ladder_jax.overlap import request as requests
from ladder_jax.parallel import exchange
from ladder_jax.residual.recurrence import barrier_forward
from ladder_jax.residual.wires import exchange as exchange_wire
from ladder_jax.residual.wires.exchange import Exchange
from ladder_jax.schedule import cost, hlo, judge, timeline
from ladder_jax.schedule.report import Status
from ladder_jax.train import metrics
from tests import cases, covering, experts, reference, test_expert_training
from tests.hlo import SUBLAYER, parsed
from tests.refusals import refused

MESHES = {
    "tensor-2": dict(tensor=2),
    "tensor-4": dict(tensor=4),
    "data-2-tensor-4": dict(data=2, tensor=4),
    "tensor-8": dict(tensor=8),
    "fsdp-2-tensor-4": dict(fsdp=2, tensor=4),
    "all-2": dict(data=2, fsdp=2, tensor=2),
}
TOPOLOGIES = [name for name in experts.TOPOLOGIES if not name.startswith("parallel")]
QUICK = [
    ("farskip", "ungated", "fsdp-2-tensor-4", Loop.SCAN, Remat.FULL),
    # A standard layer's attention is followed by experts that read what is pending: nothing is
    # prepared for them.
    ("hybrid-ladder-2", "shared", "tensor-4", Loop.SCAN, Remat.NONE),
]
ROWS = covering.array(TOPOLOGIES, experts.KINDS, MESHES, Loop, Remat)
SETTINGS = covering.marked(ROWS, chosen=QUICK)


@pytest.mark.parametrize("name, kind, mesh, loop, remat", SETTINGS)
def test_gradients(name, kind, mesh, loop, remat):
    """Without drops, the loss and every gradient are those of the dense loop, the routers' losses
    among them.
    """
    definition = experts.exchanging(name, kind, **MESHES[mesh])
    expected = experts.dense_gradients(name, kind)
    assert "all-to-all" in experts.check_gradients(
        definition, expected, loop=loop, remat=remat, sequence_parallel=True
    )


@pytest.mark.parametrize("name, waits", [("standard", True), ("ladder", False)])
def test_rows_wait_for_the_shared_expert(name, waits, monkeypatch):
    """For its input before they are sent, and for its first products before they are used; and its
    sum for them, once they are back: where nothing else hides them.
    """
    together = []

    def barrier(arrays):
        together.append([np.shape(array) for array in jax.tree.leaves(arrays)])
        return barrier_forward(arrays)

    monkeypatch.setattr(exchange_wire, "barrier_forward", barrier)
    definition = experts.exchanging(name, "shared")
    compute = train.loss_and_gradients(definition, sequence_parallel=True)
    jax.eval_shape(compute, definition.abstract, experts.tokens())
    sent = (8, 16, 32)
    arrived = (2, 64, 32)
    returned = (64, 2, 32)
    shared = (4, 16, 32)
    product = (4, 16, 6)
    assert ([sent, shared] in together) == waits, together
    assert ([product, product, arrived] in together) == waits, together
    assert ([shared, returned] in together) == waits, together


FORMS = [
    ExpertParallelism.EXCHANGE,
    covering.full(ExpertParallelism.REDUCE),
]


@pytest.mark.parametrize("form", FORMS)
def test_capacity(form):
    """An expert takes the first rows: of each rank's tokens where they are exchanged, otherwise of
    all.
    """
    definition = experts.exchanging("ladder", "routed", capacity=0.7, experts=form)
    ranks = 4 if form is ExpertParallelism.EXCHANGE else 1
    slots = math.ceil(0.7 * (64 // ranks) * 2 / 6)  # 64 tokens, two experts each, of six
    shape = experts.shape("ladder", definition.config)
    shape = dataclasses.replace(shape, slots=(slots, ranks))
    params = cases.parameters(definition)
    expected = reference.evaluate(experts.loss, params, experts.tokens(), shape, gradient=True)
    assert abs(expected[0] - experts.dense_gradients("ladder", "routed")[0]) > 1e-3
    experts.check_gradients(definition, expected, sequence_parallel=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["standard", "ladder", "farskip"])
@pytest.mark.parametrize("quantize", Quantize)
def test_prefill(name, quantize):
    """By the program of serving: the logits of the dense loop."""
    experts.check_prefill(
        name,
        experts.exchanging(name, "ungated"),
        [16, 9, 16, 1],
        loop=Loop.UNROLLED,
        quantize=quantize,
        sequence_parallel=True,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_run_reports_what_it_drops(form, book, tmp_path):
    """Of a capacity of a quarter, where every token chooses every expert, three quarters."""
    settings = [
        *test_expert_training.TINY,
        f"data.path={book}",
        f"run.dir={tmp_path / 'run'}",
        "mesh.tensor=4",
        f"mesh.experts={form.value}",
        "train.sequence_parallel=true",
        "model.num_layers=1",
        "model.moe.top_k=6",
        "model.moe.capacity=0.25",
        "train.steps=2",
        "model.residual=ladder",
    ]
    train.run(config.load("tiny-moe", overrides=settings), say=lambda line: None)
    rows = metrics.read(tmp_path / "run")
    assert [row["dropped_share"] for row in rows] == pytest.approx([0.75, 0.75])


@pytest.mark.parametrize(
    "reason, overrides",
    {
        "experts=exchange needs model.moe.capacity, such as 1.25: .* of which 4 drops no row": [],
        "experts=exchange needs sequence_parallel": ["model.moe.capacity=1"],
        "experts=exchange needs experts": ["model.moe=null", "model.residual=ladder"],
        "experts=exchange needs experts in all layers, not .*dense_layers=1": [
            "model.moe.dense_layers=1"
        ],
        "not with the residual 'parallel' .allowed: standard, ladder, ladder-K, farskip": [
            "model.residual=parallel"
        ],
        "experts=exchange: not with the residual 'no-communication'": [
            "model.residual=no-communication",
            "model.moe.capacity=1",
            "train.sequence_parallel=true",
        ],
        "model.moe.capacity must be positive, not 0": ["model.moe.capacity=0"],
        "did you mean 'exchange'": ["mesh.experts=exchnge"],
    }.items(),
)
def test_refusals(overrides, reason):
    with refused(reason):
        config.load("tiny-moe", overrides=["mesh.experts=exchange", *overrides])


def test_a_definition_is_refused_alike():
    with refused("experts=exchange needs model.moe.capacity"):
        experts.define("ladder", tensor=4, experts="exchange")


def test_too_many_rows_for_exact_places_are_refused():
    with refused("are too many: fewer tokens"):
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
    assert found.all_reduces == len(kinds) == 4
    assert set(kinds) == {"all-gather", "reduce-scatter"}
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
    assert requests.make(**SERVED).config.moe.capacity is None


@pytest.mark.parametrize(
    "reason, changes",
    {
        "experts=exchange needs sequence_parallel": dict(experts="exchange"),
        "experts=exchange needs experts": dict(
            experts="exchange", sequence_parallel=True, model="tiny"
        ),
        "not with the residual 'parallel'": dict(
            experts="exchange", sequence_parallel=True, residual="parallel"
        ),
        "--capacity 1.5 is for --experts exchange": dict(capacity=1.5),
        "model.moe.capacity must be positive": dict(
            experts="exchange", sequence_parallel=True, capacity=-1.0
        ),
        "not model.moe.dense_layers=1": dict(
            experts="exchange", sequence_parallel=True, model="dense.yaml"
        ),
    }.items(),
)
def test_requests_that_are_refused(changes, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.yaml").write_text(
        "model: {preset: tiny-moe, d_ff: 64, moe: {dense_layers: 1}}"
    )
    if "experts" in changes:
        changes = changes | {"experts": ExpertParallelism(changes["experts"])}
    with refused(reason):
        requests.make(**SERVED | changes)


def test_the_wire_refuses_what_is_not_reduced():
    """Also where no configuration has been checked before."""
    layers = residual.topology("desync-2", num_layers=2).layers
    with refused("reduces every output: not desync-n"):
        Exchange((), normalise=None, moe=config.MoEConfig()).layers(layers)
