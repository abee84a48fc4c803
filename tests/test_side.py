"""A side network: values and gradients against dense ones, what is communicated and kept, decoding,
wrong settings.
"""

import re
from dataclasses import replace

import autograd.numpy as anp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import config, nn, parallel, side
from ladder_jax.config import (
    START,
    DecodeConfig,
    DistillConfig,
    Dtype,
    Execution,
    Loop,
    Quantize,
    Remat,
    SideConfig,
    TrainConfig,
)
from ladder_jax.data.packing import Batch, Targets
from ladder_jax.decode import Generator, weights
from ladder_jax.retrain import Retraining
from ladder_jax.side import SideModel
from ladder_jax.train.gradients import held_out_loss, loss_and_gradients, task_gradients
from tests import cases, covering, engines, reference
from tests.covering import full
from tests.refusals import refused
from tests.test_objective import original

SIZES = dict(
    num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48, vocab_size=61
)
TOKENS = cases.tokens((4, 7), vocab=61)
# Each loop with each policy, and each kind of mesh; the first row is the quick suite's.
ROWS = [
    ("ladder", dict(tensor=2), Loop.SCAN, Remat.FULL),
    ("hybrid-list", dict(fsdp=2, tensor=2), Loop.UNROLLED, Remat.NONE),
    ("standard", dict(), Loop.SCAN, Remat.NONE),
    ("ladder", dict(data=2, tensor=4), Loop.UNROLLED, Remat.FULL),
    ("ladder-2", dict(tensor=4), Loop.SCAN, Remat.SAVE_MATMULS),
    ("hybrid-delay-2", dict(data=2, fsdp=2, tensor=2), Loop.SCAN, Remat.NONE),
    ("ladder", dict(fsdp=2), Loop.UNROLLED, Remat.SAVE_MATMULS),
    ("ladder", dict(tensor=2), Loop.SCAN, Remat.OFFLOAD),
]
FULL = pytest.mark.full


def define(name="ladder", *, reduction=4, **more):
    plain = cases.define(name, **{**SIZES, **more})
    return SideModel(replace(plain.config, side=SideConfig(reduction)), plain.layout)


def of_network(definition):
    model = definition.config.side.network(definition.config)
    return reference.Shape(0, model.num_heads, model.num_kv_heads, 0, "standard")


def dense(definition, params):
    """In float64: the loss of a side network, written down anew, beside a model's `params`."""
    params = jax.tree.map(np.float64, params)
    steps = definition.topology.layers
    of = replace(cases.shape("standard", definition.config, ranks=1), layers=0, vocab=0)
    of_side = of_network(definition)

    def loss(side, tokens, _):
        layers = {name: value for name, value in params["layers"].items() if name != "side"}
        xs = [params["embedding"]["table"][tokens[:, :-1]]]
        h = xs[0] @ side["down"]
        for l in range(definition.config.num_layers):
            for attends, delay in zip((True, False), (step.delay for step in steps[l])):
                x = xs[max(0, len(xs) - 1 - delay)]
                xs.append(
                    xs[-1] + reference.sublayer(layers, l, x[None], attends=attends, shape=of)[0]
                )
            p = jax.tree.map(lambda a: a[l], side["layers"])
            mu = 1 / (1 + anp.exp(-p["gate"] / 0.1))
            h = mu * h + (1 - mu) * xs[len(xs) - 1 - steps[l][-1].pending_after] @ p["tap"]
            norm = lambda name, h: reference.rms(h, p[name]["scale"], 1e-5)[None]
            h = h + reference.attention(p["attention"], norm("attention_norm", h), of_side)[0]
            h = h + reference.mlp(p["mlp"], norm("mlp_norm", h), of_side)[0]
        x = xs[-1] + reference.rms(h, side["norm"]["scale"], 1e-5) @ side["up"]
        x = reference.rms(x, params["final_norm"]["scale"], 1e-5)
        scores = (x @ params["head"]["table"].T)[..., : SIZES["vocab_size"]]
        return (reference.logsumexp(scores) - reference.picked(scores, tokens[:, 1:])).mean()

    return loss


def compute(plan, params, tokens=TOKENS, **train):
    trained, frozen = plan.split(cases.place(params, plan.definition))
    return jax.jit(task_gradients(plan, config=TrainConfig(**train)))(trained, frozen, tokens, {})


@pytest.mark.parametrize(
    "name, mesh, loop, remat",
    [ROWS[0], *(full(*row) for row in ROWS[1:])],
    ids=str,
)
def test_loss_and_gradients_are_the_dense_ones(name, mesh, loop, remat):
    definition = define(name, **mesh)
    plan = Retraining(definition)
    params = cases.parameters(definition)
    (loss, _), grads = compute(plan, params, loop=loop, remat=remat)
    network = plan.split(params)[0]["side"]
    exact = dense(definition, params)
    expected, wanted = reference.evaluate(exact, network, TOKENS, None, gradient=True)
    assert set(grads) == {"side"}
    found = loss, grads["side"]
    # its sublayers stand behind as many of the model
    cases.assert_close(found, (expected, wanted), definition=definition, passes=4)


@pytest.mark.parametrize("more", [
    dict(tensor=2),
    full(dict(fsdp=2, tensor=2)),
    full(dict(tensor=4, biases="all", qk_norm=True, reduction=2)),
    full(dict(tensor=2, dtype=Dtype.BFLOAT16, residual_dtype=Dtype.BFLOAT16)),
], ids=str)  # fmt: skip
def test_the_first_step_starts_from_the_model_itself(more):
    """To the bit. In bfloat16 XLA leaves out roundings, other ones in another program: not here."""
    plan = Retraining(define("hybrid-list", **more))
    base = Retraining(plan.without_side)
    params = cases.placed(base.definition)
    exact = dict(compiler_options={"xla_allow_excess_precision": False})
    loss = lambda task, *args: jax.jit(held_out_loss(task).__wrapped__, **exact)(*args, TOKENS)
    frozen = plan.split(params)[1]
    before = loss(base, params, {})
    network = plan.initial_side(seed=3)
    assert loss(plan, network, frozen) == before
    moved = {"side": {**network["side"], "up": network["side"]["up"] + 0.1}}
    assert abs(loss(plan, moved, frozen) - before) > 1e-3


def kept_for_backward(plan, *, loop, remat):
    """The shapes of what a rank keeps of the forward pass for the backward pass."""
    definition, kept = plan.definition, []

    def local(trained, frozen, tokens):
        batch = Targets(tokens[:, :-1], tokens[:, 1:], jnp.ones(TOKENS[:, 1:].shape), None)
        settings = dict(scheduled={}, config=TrainConfig(loop=loop, remat=remat))
        loss, pull = jax.vjp(lambda t: plan.loss_sum(t, frozen, batch, **settings)[0], trained)
        kept.extend(leaf.shape for leaf in jax.tree.leaves(pull))
        return parallel.all_reduce(loss, definition.layout.batch)

    trained, frozen = plan.split(definition.abstract)
    jax.eval_shape(
        parallel.on_mesh(
            local,
            layout=definition.layout,
            in_dims=(plan.trained_dims, plan.frozen_dims, "BT"),
            out_dims="",
        ),
        trained,
        frozen,
        TOKENS,
    )
    return kept


@pytest.mark.parametrize(
    "loop, remat", covering.rows(Loop, (Remat.NONE, Remat.FULL, Remat.SAVE_MATMULS), pairs=[])
)
def test_nothing_of_the_model_is_kept_but_the_taps(loop, remat):
    definition = define(d_model=44, d_ff=52)  # sizes that nothing else has
    shapes = kept_for_backward(Retraining(definition), loop=loop, remat=remat)
    assert not [shape for shape in shapes if 52 in shape], "a feed-forward size"
    rows, length, layers = *TOKENS[:, 1:].shape, definition.config.num_layers
    streams = [shape for shape in shapes if shape[-3:] == (rows, length, 44)]
    # One a layer, the embedding, and (of the final norm) the last stream with what is computed from
    # it.
    assert layers < sum(shape[0] if len(shape) == 4 else 1 for shape in streams) <= layers + 6
    everything = kept_for_backward(
        Retraining(Retraining(definition).without_side), loop=loop, remat=Remat.NONE
    )
    assert [shape for shape in everything if 52 in shape]


def collectives(jaxpr):
    """Over the tensor ranks, each loop's once."""
    return len(
        re.findall(
            r"(?:psum|psum_invariant|psum_scatter|all_gather\w*)\[\s*[^\]]*'tensor'", str(jaxpr)
        )
    )


@pytest.mark.parametrize("loop", Loop)
def test_the_side_network_communicates_nothing(loop):
    """Forward the model's all-reduces; backward the one of the final stream's gradient."""
    plan = Retraining(define(tensor=2))

    def forward(definition):
        def local(params, tokens):
            x, _ = nn.hidden(definition, params, tokens, execution=Execution(loop=loop))
            return parallel.all_reduce(x.sum(), definition.layout.all_axes)

        ranked = parallel.on_mesh(
            local, layout=definition.layout, in_dims=(definition.dims, "BT"), out_dims=""
        )
        return collectives(jax.make_jaxpr(ranked)(definition.abstract, TOKENS))

    assert forward(plan.definition) == forward(plan.without_side) > 0
    of_task = lambda task: jax.make_jaxpr(task_gradients(task, config=TrainConfig(loop=loop)))
    mine = collectives(
        of_task(plan)(plan.abstract, {"model": plan.without_side.abstract}, TOKENS, {})
    )
    base = Retraining(plan.without_side)
    whole = collectives(of_task(base)(base.abstract, {}, TOKENS, {}))
    layers = 2 * (plan.definition.config.num_layers if loop is Loop.UNROLLED else 1)
    assert whole - mine >= layers


PROMPTS = [
    row[:length].tolist()
    for row, length in zip(cases.tokens((5, 40), vocab=61), (35, 40, 3, 17, 8))
]


@FULL  # the quick suite's is in test_retrain.py
@pytest.mark.parametrize("name, tensor, loop", [
    ("ladder", 2, Loop.UNROLLED),
    ("hybrid-list", 4, Loop.SCAN),
    ("standard", 1, Loop.UNROLLED),
])  # fmt: skip
def test_decoding_runs_the_side_network(name, tensor, loop):
    """With a cache of its own: greedy tokens are those of whole forward passes, also where prompts
    come in chunks.
    """
    definition = define(name, tensor=tensor)
    params = cases.placed(definition)
    prompts = PROMPTS[:2]
    generator = Generator(definition, params, loop=loop)
    settings = DecodeConfig(max_new_tokens=3, temperature=0.0, prefill_chunk=32)
    for prompt, new in zip(prompts, generator.tokens(prompts, config=settings)):
        sequence = np.array([prompt + new.tolist()])
        scores = nn.compiled_logits(definition)(params, sequence)[0, len(prompt) - 1 : -1]
        np.testing.assert_array_equal(scores.argmax(-1), new)


def test_an_unrolled_side_network_has_each_matrix_apart():
    """A slice of a stack would be copied before its matmul."""
    stored = jax.tree.leaves(weights.dims(define(), loop=Loop.UNROLLED))
    assert {dims for dims in stored if dims.startswith("L")} == {"LD", "Ld", "Li"}


@FULL
@pytest.mark.parametrize("quantize", Quantize)
def test_slots_hold_the_side_networks_caches(quantize):
    """Requests of several lengths, one after another in the same slots: each gets the tokens that
    it gets alone.
    """
    definition = define(tensor=2)
    params = cases.placed(definition)
    engines.check_as_alone(
        definition, params, PROMPTS, new=6, quantize=quantize, slots=2, capacity=64, chunk=5
    )


@FULL
def test_a_teacher_beside_a_side_network():
    """Of the same weights; shared layers are computed once, and at first it says what it says to
    the model itself.
    """
    definition = define("hybrid-list", tensor=2)
    plan = Retraining(definition)
    teacher = original(plan.without_side)
    plan = replace(plan, distill=DistillConfig(START), teacher=teacher)
    base = replace(plan, definition=plan.without_side)
    params = cases.placed(base.definition)
    frozen = plan.split(params)[1]
    assert set(frozen) == {"model"}  # nothing is stored twice
    compute = lambda task, *values: jax.jit(task_gradients(task, config=TrainConfig()))(
        *values, TOKENS, {}
    )
    (loss, _), grads = compute(plan, plan.initial_side(seed=0), frozen)
    (before, _), _ = compute(base, *base.split(params))
    assert cases.error(loss, before) < cases.bound(definition.config)
    assert float(loss) > 1e-3
    assert jnp.abs(grads["side"]["up"]).max() > 0


@FULL
def test_emulated_ranks_and_packed_rows():
    """ladder-fresh of two ranks on one device is that on two; documents in a row do not see each
    other.
    """
    real = define("ladder-fresh", tensor=2)
    params = cases.parameters(real)
    batch = Batch(TOKENS, np.array([[1, 1, 1, 2, 2, 2, 2]] * 4, np.int32), np.ones_like(TOKENS))
    (wanted, _), others = compute(Retraining(real), params, batch)
    emulated = define("ladder-fresh", ranks=2)
    (loss, _), grads = compute(Retraining(emulated), params, batch, accumulate=2)
    limit = cases.bound(real.config, passes=2)
    assert cases.error(loss, wanted) < limit
    assert max(jax.tree.leaves(jax.tree.map(cases.error, grads, others))) < 4 * limit


def test_the_sizes_of_the_network():
    def shape(name, reduction):
        model = SideConfig(reduction).network(config.preset(name))
        return model.d_model, model.d_ff, model.num_heads, model.num_kv_heads, model.head_dim

    assert shape("llama-3-8b", 8) == (512, 1792, 4, 1, 128)
    assert shape("llama-3-8b", 16) == (256, 896, 4, 1, 64)
    assert shape("smollm2-135m", 8) == (72, 192, 9, 3, 8)
    assert shape("llama-3-8b", 1) == (4096, 14336, 32, 8, 128)


@pytest.mark.parametrize("given, said", {
    "model.side.reduction=3": r"model.side.reduction=3 does not divide",
    "model.side.reduction=0": "model.side.reduction must be positive",
    "model.side.reductoin=8": "did you mean 'model.side.reduction'",
    "model.side.reduction=8": "model.side needs train.start",
    "model.side.reduction=8 train.start=x lora.rank=2": "lora.rank=2 and model.side exclude each other",
    "model.side.reduction=8 train.start=x train.freeze=1": "train.freeze=1 and model.side exclude each other",
    "model.side.reduction=8 train.start=x conversion.steps=9": "conversion.steps=9 and model.side exclude",
    "model.side.reduction=8 train.start=x train.sequence_parallel=true": "exclude each other: it reads whole",
    "model.side.reduction=8 train.start=x train.interleave=2": "train.interleave=2 exclude each other: of whole",
    "model.side.reduction=8 train.start=x distill.teacher=x distill.hidden_weight=1": "hidden_weight=1.0",
    "model.side.reduction=8 train.start=x model.moe.experts=4"
     " model.moe.top_k=2 model.moe.expert_width=8": "model.side is for dense models only",
}.items(), ids=str)  # fmt: skip
def test_settings_that_cannot_be(given, said):
    with refused(said):
        config.load("tiny", overrides=given.split())


def test_all_weights_do_not_train_beside_a_side_network():
    with refused("of a SideModel not all weights train: its task is retrain.Retraining"):
        loss_and_gradients(define())


def test_a_plain_definition_does_not_leave_the_network_out():
    config = cases.model("ladder", side=SideConfig(4))
    mesh = parallel.make_mesh(tensor=2)
    with refused("model.side is no part of a ModelDef: ladder_jax.side defines such models"):
        nn.define(config, mesh=mesh)
    assert side.define(config, mesh=mesh).without_side() == cases.define("ladder", tensor=2)
    with refused("a model without model.side is defined by ladder_jax.nn"):
        side.define(replace(config, side=None), mesh=mesh)
