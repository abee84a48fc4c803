"""Where features meet: hybrids on a split stream, emulated ranks with recomputation, padding
beside exchanged experts.
"""

import numpy as np
import pytest

from experiments import combinations, study
from ladder_jax import config
from ladder_jax.config import CollectiveMatmul, Dtype, Loop, Remat
from tests import cases, covering, experts
from tests.refusals import refused

TOKENS = cases.tokens((4, 9))  # 8 positions, over 2 or 4 ranks


RING = dict(sequence_parallel=True, collective_matmul=CollectiveMatmul.RING)
SPLIT = dict(sequence_parallel=True)
FOUR = dict(ranks=4, num_layers=2)  # which one device emulates
MEETINGS = covering.marked(
    [
        ("hybrid-fresh", dict(tensor=2), dict(loop=Loop.SCAN, **SPLIT)),
        ("hybrid-delay-3-first", dict(tensor=4), dict(loop=Loop.UNROLLED, **SPLIT)),
        ("ladder-fresh", FOUR, dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS)),
        ("desync-2", FOUR, dict(loop=Loop.UNROLLED, remat=Remat.FULL)),
        ("desync-2", FOUR, dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS)),
    ],
    chosen=[
        ("hybrid-fresh", dict(tensor=4), dict(loop=Loop.UNROLLED, **RING)),
        ("hybrid-delay-2", dict(tensor=2), dict(loop=Loop.SCAN, **SPLIT)),
        ("ladder-fresh", FOUR, dict(loop=Loop.UNROLLED, remat=Remat.FULL)),
    ],
)


@pytest.mark.parametrize("name, form, settings", MEETINGS)
def test_loss_and_gradients(name, form, settings):
    """A standard layer of a hybrid prepares the split input of the layer after it, whose kind
    differs; and emulated ranks recompute outside a scan.
    """
    cases.check_case(name, form, shape_BT=(4, 9), **settings)


def test_a_hybrids_prefill_on_a_split_stream():
    """With a stream of another dtype than that of compute, which a scan carries from layer to
    layer.
    """
    definition = cases.define("hybrid-fresh", tensor=2, residual_dtype=Dtype.BFLOAT16)
    whole, split = (
        cases.prefilled(definition, TOKENS[:, :8], [8] * 4, sequence_parallel=split)[0]
        for split in (False, True)
    )
    # The stream is rounded to bfloat16 after each of 8 sublayers, here and there of sums in another
    # order.
    assert cases.error(split, whole) < 8 * 2.0**-8


def test_emulated_ranks_are_not_split_over_fsdp():
    """Decided from the configuration, before jax starts."""
    emulated = ["model.residual=ladder-fresh", "model.ranks=4", "mesh.fsdp=2"]
    with refused("emulated on one device, .* mesh.fsdp=2 .*allowed: mesh.tensor=4"):
        config.load("tiny", overrides=emulated)
    assert config.load("tiny", overrides=[*emulated, "mesh.tensor=4"]).mesh.fsdp == 2


def test_padding_takes_no_place_with_an_exchanged_expert():
    """Prefill's logits of a row do not depend on what stands behind another row's end."""
    definition = experts.exchanging("ladder", "ungated", capacity=1.0)
    lengths, tokens = np.array([3, 16, 5, 16]), experts.tokens()[:, :16]
    padding = np.arange(16)[None, :] >= lengths[:, None]
    logits = [
        cases.prefilled(
            definition, np.where(padding, fill, tokens), lengths, sequence_parallel=True
        )[0]
        for fill in (0, 7, tokens[::-1])
    ]
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_the_pages_table_is_what_the_rules_say():
    text = combinations.PAGE.read_text()
    assert study.fill(text, {combinations.TABLE: combinations.table()}) == text
    assert (
        "emulated on one device"
        in combinations.excluded()["emulated ranks: `model.ranks=4`", "`mesh.fsdp=2`"][:80]
    )
    assert all(combinations.refusal(one.all_settings) is None for one in combinations.FEATURES)
