"""What the compilers make of a mixture of experts, all-reduced: two all-reduces a layer, hidden
under whole sublayers.

4 layers of Qwen3-30B-A3B over 8 devices; decode batch 16 at context 2048, prefill and train 1 x
1024. See `test_overlap.py`. On TPUs the experts' matmuls are kernels, in the counts of FLOPs by
`schedule/grouped.py`.
"""

import pytest

from ladder_jax.config import Launch, Phase
from tests.audit.conftest import LAYERS, SERVING, case, check, counted

pytestmark = pytest.mark.audit

WITH_HALVES = ("v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")  # of the TPUs
ALL = (*WITH_HALVES, "h100:8", "b200:8")
SAMPLE = {("v6e:2x4", Phase.PREFILL), ("h100:8", Phase.DECODE)}


def of_experts(target, phase, residual="ladder", *, model="qwen3-30b-a3b", full=True):
    return case(target, phase, residual, model=model, loop=None, full=full)


LADDERS = [of_experts(t, phase, full=(t, phase) not in SAMPLE) for t in ALL for phase in SERVING]
STANDARD = [of_experts(t, phase, "standard") for t in (*ALL[:4], "v5e:2x4") for phase in SERVING]


def shared(residual):
    two = ("v5p:2x2x2", Phase.PREFILL), ("h100:8", Phase.DECODE)
    return [of_experts(*place, residual, model="qwen1.5-moe-a2.7b") for place in two]


COUNTS = [
    *counted(LADDERS, all_reduces=2 * LAYERS, hidden=2 * LAYERS - 1),
    *counted(STANDARD + shared("standard"), all_reduces=2 * LAYERS, hidden=0),
    *counted(shared("ladder"), all_reduces=2 * LAYERS, hidden=2 * LAYERS - 1),
    # One beside the routed experts, without the shared one, and one beside attention.
    *counted(shared("farskip"), all_reduces=2 * LAYERS, hidden=2 * LAYERS - 1, window=0.5),
]


def check_flops(answer):
    """No matmul beside those that a token passes: expanded, the experts' alone are 128 times as
    many.
    """
    found = answer.as_dict()
    assert 0.9 < found["flops"] / found["flops_active"] < 1.1, found["grouped_matmuls"]


@pytest.mark.parametrize("request_, counts", COUNTS)
def test_counts(request_, counts, compiled):
    answer = compiled(request_)
    check(answer, **counts)
    assert answer.report.hidden == counts["hidden"], answer.verdict


@pytest.mark.parametrize("request_", LADDERS)
def test_halves_around_the_experts(request_, compiled):
    answer = compiled(request_)
    assert answer.record.launch == Launch.EXPLICIT.value
    if request_.target.platform == "tpu":
        check_flops(answer)


@pytest.mark.parametrize("request_", [of_experts("v5e:2x4", phase) for phase in SERVING])
def test_a_v5e_hides_under_attention_only(request_, compiled):
    """It overlaps an all-reduce by fusing it with a matmul of XLA's, and beside the experts there
    is only the router's. So all of those that attention hides, and no other.
    """
    report = compiled(request_).report
    hidden = [r.sublayer for r in report.reductions if r.status.name == "HIDDEN"]
    assert (report.all_reduces, report.merged, hidden) == (2 * LAYERS, 0, ["mlp"] * (LAYERS - 1)), (
        report.verdict
    )


@pytest.mark.parametrize("request_", [of_experts(target, Phase.TRAIN) for target in WITH_HALVES])
def test_training(request_, compiled):
    """Of the scanned step only the last is left, behind the loop; backward, both of a layer's are
    beside the other.
    """
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.exposed, answer.report.merged) == (
        4 * LAYERS + 1,
        1,
        0,
    )
    check_flops(answer)


@pytest.mark.machine_code
@pytest.mark.parametrize(
    "request_", [of_experts(target, phase) for target in WITH_HALVES for phase in SERVING]
)
def test_most_of_the_time_is_beside_a_reduction(request_, compiled):
    assert compiled(request_).report.hidden_time_fraction > 0.6


@pytest.mark.machine_code
@pytest.mark.parametrize("request_", [of_experts(target, Phase.DECODE) for target in WITH_HALVES])
def test_a_decode_step_reads_the_chosen_experts(request_, compiled):
    """And the weights and the cache once. Of 16 tokens with 8 experts each, 82 of 128 are expected
    to be chosen.
    """
    answer = compiled(request_)
    assert 0.9 < answer.bytes_accessed / answer.record.bytes_minimum <= 1.25
