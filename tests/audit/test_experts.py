"""What the compilers make of a mixture of experts, all-reduced: two all-reduces a layer, hidden under whole sublayers.

4 layers of Qwen3-30B-A3B over 8 devices; decode batch 16 at context 2048, prefill and train 1 x 1024. See
`test_overlap.py`. On TPUs the experts' matmuls are kernels, in the counts of FLOPs by `schedule/grouped.py`.
"""

import pytest

from ladder_jax.config import Launch, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Until
from tests.audit.conftest import absent
from tests.audit.test_overlap import LAYERS, SERVING, TPUS

pytestmark = pytest.mark.audit

ALL = ("v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8")
SAMPLE = [("v6e:2x4", Phase.PREFILL), ("h100:8", Phase.DECODE)]
SHARED = "qwen1.5-moe-a2.7b"  # with a shared expert
CASES = [
    pytest.param(target, phase, marks=() if (target, phase) in SAMPLE else pytest.mark.full)
    for target in ALL
    for phase in SERVING
]


def compiled(target, phase, residual="ladder", model="qwen3-30b-a3b", **more):
    request = requests.make(target=target, phase=phase, residual=residual, model=model, layers=LAYERS, **more)
    if reason := absent(request):
        pytest.skip(reason)
    until = Until.SCHEDULE if phase is Phase.TRAIN else Until.CODE
    return result.read(request, compiling.compiled(request, until=until))


def check_flops(answer):
    """No matmul beside those that a token passes: expanded, the experts' alone are 128 times as many."""
    found = answer.as_dict()
    assert 0.9 < found["flops"] / found["flops_active"] < 1.1, found["grouped_matmuls"]


@pytest.mark.parametrize("target, phase", CASES)
def test_all_but_the_last_are_hidden(target, phase):
    answer = compiled(target, phase)
    report = answer.report
    assert (report.all_reduces, report.hidden, report.merged) == (2 * LAYERS, 2 * LAYERS - 1, 0), answer.verdict
    assert answer.record.launch == Launch.EXPLICIT.value and report.window_flops_fraction["least"] >= 0.8
    if target in TPUS:
        check_flops(answer)
        assert answer.report.hidden_time_fraction > 0.6


@pytest.mark.full
@pytest.mark.parametrize("target, phase", [(target, phase) for target in (*TPUS, "h100:8") for phase in SERVING])
def test_standard_hides_nothing(target, phase):
    """The control."""
    answer = compiled(target, phase, "standard")
    assert (answer.report.all_reduces, answer.report.hidden) == (2 * LAYERS, 0), answer.verdict


@pytest.mark.full
@pytest.mark.parametrize("target, phase", [("v5p:2x2x2", Phase.PREFILL), ("h100:8", Phase.DECODE)])
@pytest.mark.parametrize("residual, hidden", [("standard", 0), ("ladder", 7), ("farskip", 7)])
def test_two_all_reduces_a_layer_with_a_shared_expert(target, phase, residual, hidden):
    """Of farskip one beside the routed experts, without the shared one, and one beside attention."""
    report = compiled(target, phase, residual, SHARED).report
    assert (report.all_reduces, report.hidden, report.merged) == (2 * LAYERS, hidden, 0), report.verdict


@pytest.mark.full
@pytest.mark.parametrize("phase", SERVING)
def test_a_v5e_hides_under_attention_only(phase):
    """It overlaps an all-reduce by fusing it with a matmul of XLA's, and beside the experts there is only the router's.
    So all of those that attention hides, and no other."""
    report = compiled("v5e:2x4", phase).report
    hidden = [r.sublayer for r in report.reductions if r.status.name == "HIDDEN"]
    assert (report.all_reduces, report.merged, hidden) == (2 * LAYERS, 0, ["mlp"] * (LAYERS - 1)), report.verdict


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_training(target):
    """Of the scanned step only the last is left, behind the loop; backward, both of a layer's are beside the other."""
    answer = compiled(target, Phase.TRAIN)
    assert (answer.report.all_reduces, answer.report.exposed, answer.report.merged) == (4 * LAYERS + 1, 1, 0)
    check_flops(answer)


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_a_decode_step_reads_the_chosen_experts(target):
    """And the weights and the cache once. Of 16 tokens with 8 experts each, 82 of 128 are expected to be chosen."""
    answer = compiled(target, Phase.DECODE)
    assert 0.9 < answer.bytes_accessed / answer.record.bytes_minimum <= 1.25
