"""What the compilers make of a mixture of experts, all-reduced: two all-reduces a layer, hidden
under whole sublayers.

4 layers of Qwen3-30B-A3B over 8 devices; decode batch 16 at context 2048, prefill and train 1 x
1024. See `test_overlap.py`. On TPUs the experts' matmuls are kernels, in the counts of FLOPs by
`schedule/grouped.py`.
"""

import pytest

from ladder_jax.config import Launch
from tests.audit.conftest import LAYERS, check, table

pytestmark = pytest.mark.audit

QWEN3 = "qwen3-30b-a3b"
QWEN1 = "qwen1.5-moe-a2.7b"
WITH_HALVES = "v5p:2x2x2 v6e:2x4 tpu7x:2x2x1"  # of the TPUs
PREFILL = f"--phase prefill --residual ladder | {WITH_HALVES}"
DECODE = f"--phase decode --residual ladder | {WITH_HALVES}"
LADDERS = """
    --phase prefill --residual ladder | v5p:2x2x2 v6e:2x4* tpu7x:2x2x1 h100:8 b200:8 | 8 7
    --phase decode --residual ladder | v5p:2x2x2 v6e:2x4 tpu7x:2x2x1 h100:8* b200:8 | 8 7
"""
STANDARD = """
    --phase prefill --residual standard | TPUS h100:8 | 8 0
    --phase decode --residual standard | TPUS h100:8 | 8 0
"""
SHARED = """
    --phase prefill --residual standard | v5p:2x2x2 | 8 0
    --phase decode --residual standard | h100:8 | 8 0
    --phase prefill --residual ladder | v5p:2x2x2 | 8 7
    --phase decode --residual ladder | h100:8 | 8 7
    --phase prefill --residual farskip | v5p:2x2x2 | 8 7
    --phase decode --residual farskip | h100:8 | 8 7
"""
ON_V5E = """
    --phase prefill --residual ladder | v5e:2x4
    --phase decode --residual ladder | v5e:2x4
"""


def check_flops(answer):
    """No matmul beside those that a token passes: expanded, the experts' alone are 128 times as
    many.
    """
    found = answer.as_dict()
    assert 0.9 < found["flops"] / found["flops_active"] < 1.1, found["grouped_matmuls"]


@pytest.mark.parametrize(
    "request_, counts", table(LADDERS + STANDARD, model=QWEN3) + table(SHARED, model=QWEN1)
)
def test_counts(request_, counts, compiled):
    """A ladder's in halves, around the experts."""
    answer = compiled(request_)
    # FarSkip: one beside the routed experts, without the shared one, and one beside attention.
    check(answer, *counts, window=0.5 if request_.residual == "farskip" else 0.8)
    assert answer.report.hidden == counts[1], answer.verdict
    if request_.model == QWEN3 and request_.residual == "ladder":
        assert answer.record.launch == Launch.EXPLICIT.value
        if request_.target.platform == "tpu":
            check_flops(answer)


@pytest.mark.parametrize("request_", table(ON_V5E, model=QWEN3))
def test_a_v5e_hides_under_attention_only(request_, compiled):
    """It overlaps an all-reduce by fusing it with a matmul of XLA's, and beside the experts there
    is only the router's. So all of those that attention hides, and no other.
    """
    report = compiled(request_).report
    hidden = [r.sublayer for r in report.reductions if r.status.name == "HIDDEN"]
    assert (report.all_reduces, report.merged, hidden) == (2 * LAYERS, 0, ["mlp"] * (LAYERS - 1)), (
        report.verdict
    )


@pytest.mark.parametrize(
    "request_, counts",
    table(f"--phase train --residual ladder | {WITH_HALVES} | 17 16", model=QWEN3),
)
def test_training(request_, counts, compiled):
    """Of the scanned step only the last is left, behind the loop; backward, both of a layer's are
    beside the other.
    """
    answer = compiled(request_)
    check(answer, *counts)
    check_flops(answer)


@pytest.mark.machine_code
@pytest.mark.parametrize("request_", table(f"{PREFILL}\n{DECODE}", model=QWEN3))
def test_most_of_the_time_is_beside_a_reduction(request_, compiled):
    assert compiled(request_).report.hidden_time_fraction > 0.6


@pytest.mark.machine_code
@pytest.mark.parametrize("request_", table(DECODE, model=QWEN3))
def test_a_decode_step_reads_the_chosen_experts(request_, compiled):
    """And the weights and the cache once. Of 16 tokens with 8 experts each, 82 of 128 are expected
    to be chosen.
    """
    answer = compiled(request_)
    assert 0.9 < answer.bytes_accessed / answer.record.bytes_minimum <= 1.25
