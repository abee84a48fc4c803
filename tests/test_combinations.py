"""Where features meet: hybrids on a split stream, emulated ranks with recomputation, experts
exchanged in bfloat16.
"""

import jax
import numpy as np
import pytest

from experiments import combinations, study
from ladder_jax import config, decode, nn, parallel, train
from ladder_jax.config import CollectiveMatmul, Dtype, ExpertParallelism, Loop, Remat
from ladder_jax.decode import weights
from ladder_jax.errors import UserError
from ladder_jax.nn import quantized
from tests import cases, experts, reference

TOKENS = cases.tokens((4, 9))  # 8 positions, over 2 or 4 ranks


def check(name, *, tensor=1, ranks=None, layers=4, **settings):
    """Loss and gradients are the reference's."""
    definition = cases.define(name, tensor=tensor, ranks=ranks, num_layers=layers)
    step = jax.jit(train.loss_and_gradients(definition, **settings))
    shape = cases.shape(name, definition.config, ranks=ranks or tensor)
    expected = reference.evaluate(
        reference.loss, cases.parameters(definition), TOKENS, shape, gradient=True
    )
    cases.assert_close(step(cases.placed(definition), TOKENS), expected, definition=definition)


SPLIT_HYBRIDS = [
    pytest.param("hybrid-fresh", 2, Loop.SCAN, CollectiveMatmul.NONE, marks=pytest.mark.full),
    ("hybrid-fresh", 4, Loop.UNROLLED, CollectiveMatmul.RING),
    ("hybrid-delay-2", 2, Loop.SCAN, CollectiveMatmul.NONE),
    pytest.param(
        "hybrid-delay-3-first", 4, Loop.UNROLLED, CollectiveMatmul.NONE, marks=pytest.mark.full
    ),
]


@pytest.mark.parametrize("name, tensor, loop, form", SPLIT_HYBRIDS)
def test_a_hybrid_on_a_split_stream_is_the_same_function(name, tensor, loop, form):
    """A standard layer prepares the input of the layer after it, whose kind differs."""
    settings = dict(loop=loop, sequence_parallel=True, collective_matmul=form)
    check(name, tensor=tensor, **settings)


def test_a_hybrids_prefill_on_a_split_stream():
    """With a stream of another dtype than that of compute, which a scan carries from layer to
    layer.
    """
    definition = cases.define("hybrid-fresh", tensor=2, residual_dtype=Dtype.BFLOAT16)
    placed = cases.placed(definition)
    found = []
    for split in (False, True):
        params = weights.prepare(definition, placed, loop=Loop.SCAN)
        program = decode.prefill(definition, capacity=8, loop=Loop.SCAN, sequence_parallel=split)
        logits, _ = program(params, TOKENS[:, :8], np.full(4, 8, np.int32))
        found.append(np.asarray(logits)[:, : definition.config.vocab_size])
    # The stream is rounded to bfloat16 after each of 8 sublayers, here and there of sums in another
    # order.
    assert cases.error(found[1], found[0]) < 8 * 2.0**-8


@pytest.mark.parametrize("name", ["ladder-fresh", pytest.param("desync-2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "remat", [Remat.FULL, pytest.param(Remat.SAVE_MATMULS, marks=pytest.mark.full)]
)
def test_emulated_ranks_recompute_outside_a_scan(name, remat):
    check(name, ranks=4, layers=2, loop=Loop.UNROLLED, remat=remat)


def test_emulated_ranks_are_not_split_over_fsdp():
    """Decided from the configuration, before jax starts."""
    emulated = ["model.residual=ladder-fresh", "model.ranks=4", "mesh.fsdp=2"]
    with pytest.raises(
        UserError, match="emulated on one device, .* mesh.fsdp=2 .*allowed: mesh.tensor=4"
    ):
        config.load("tiny", overrides=emulated)
    assert config.load("tiny", overrides=[*emulated, "mesh.tensor=4"]).mesh.fsdp == 2


def exchanged(name, kind, *, tensor=4, capacity=None, **changes):
    """A definition with a capacity that holds every row, unless given."""
    moe = experts.KINDS[kind]
    moe = {**moe, "capacity": capacity or moe["experts"] / moe["top_k"]}
    mesh = parallel.make_mesh(tensor=tensor)
    return nn.define(
        experts.model(name, kind, moe=moe, **changes), mesh=mesh, experts=ExpertParallelism.EXCHANGE
    )


@pytest.mark.parametrize(
    "name, loop",
    [
        ("hybrid-ladder-2", Loop.SCAN),
        pytest.param("hybrid-ladder-2", Loop.UNROLLED, marks=pytest.mark.full),
    ],
)
def test_exchanged_experts_in_a_hybrid_with_a_delay_of_two(name, loop):
    """A standard layer's attention is followed by experts that read what is pending: nothing is
    prepared for them.
    """
    definition = exchanged(name, "shared")
    expected = experts.dense_gradients(name, "shared")
    experts.check_gradients(definition, expected, loop=loop, sequence_parallel=True)


def test_padding_takes_no_place_with_an_exchanged_expert():
    """Prefill's logits of a row do not depend on what stands behind another row's end."""
    definition = exchanged("ladder", "ungated", capacity=1.0)
    placed = cases.placed(definition)
    params = weights.prepare(definition, placed, loop=Loop.SCAN)
    program = decode.prefill(definition, capacity=16, loop=Loop.SCAN, sequence_parallel=True)
    lengths, tokens = np.array([3, 16, 5, 16], np.int32), experts.tokens()[:, :16]
    padding = np.arange(16)[None, :] >= lengths[:, None]
    logits = [
        np.asarray(program(params, np.where(padding, fill, tokens), lengths)[0])
        for fill in (0, 7, tokens[::-1])
    ]
    assert np.array_equal(logits[0], logits[1]) and np.array_equal(logits[0], logits[2])


def test_a_weights_gradient_of_exchanged_experts_in_bfloat16():
    """Against float64: sums of 32 exact products in float32, rounded once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(
        jax.numpy.asarray(rng.standard_normal(shape), jax.numpy.bfloat16)
    )
    x, weight, gradient = draw(4, 32, 16), draw(4, 16, 24), draw(32, 4, 24)

    def pulled_back(x, weight, gradient):
        product = lambda x, weight: quantized.einsum("ERM,EMD->RED", x, weight)
        return jax.vjp(product, x, weight)[1](gradient)

    of_x, of_weight = jax.jit(pulled_back)(x, weight, gradient)
    wide = [np.asarray(a, np.float64) for a in (x, weight, gradient)]
    assert cases.error(of_weight, np.einsum("erm,red->emd", wide[0], wide[2])) < 2.0**-8
    assert cases.error(of_x, np.einsum("red,emd->erm", wide[2], wide[1])) < 2.0**-8


def test_the_pages_table_is_what_the_rules_say():
    text = combinations.PAGE.read_text()
    assert study.fill(text, {combinations.TABLE: combinations.table()}) == text
    exclusions = combinations.excluded()
    assert (
        "emulated on one device"
        in exclusions["emulated ranks: `model.ranks=4`", "`mesh.fsdp=2`"][:80]
    )
    assert all(combinations.refusal(one.all_settings) is None for one in combinations.FEATURES)
