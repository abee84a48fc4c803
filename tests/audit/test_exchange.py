"""What the compilers make of exchanged experts, of 32,768 tokens, 4 layers over 8 devices: Qwen3-30B-A3B, and
Qwen1.5-MoE-A2.7B, which has a shared expert.

See `test_overlap.py`. The last layer's combine has no compute after it, nor backward its transpose any before it.
"""

import pytest

from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Until
from ladder_jax.schedule.report import Status
from tests.audit.conftest import absent
from tests.audit.test_overlap import LAYERS

pytestmark = pytest.mark.audit

TARGETS = ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8", "v6e:2x4")
SAMPLE = [("ladder", "v5p:2x2x2"), ("ladder", "h100:8"), ("standard", "h100:8")]
CASES = [
    pytest.param(name, target, marks=() if (name, target) in SAMPLE else pytest.mark.full)
    for name in ("ladder", "standard")
    for target in TARGETS
]
PREFILL = dict(phase=Phase.PREFILL, prompt_length=32768)
TRAIN = dict(phase=Phase.TRAIN, batch=8, prompt_length=4096)


def compiled(name, target, *, model="qwen3-30b-a3b", phase=Phase.PREFILL, **shape):
    settings = dict(layers=LAYERS, sequence_parallel=True, experts=ExpertParallelism.EXCHANGE, phase=phase, **shape)
    request = requests.make(model=model, target=target, residual=name, **settings)
    if reason := absent(request):
        pytest.skip(reason)
    until = Until.SCHEDULE if phase is Phase.TRAIN else Until.CODE
    return result.read(request, compiling.compiled(request, until=until))


@pytest.mark.parametrize("name, target", CASES)
def test_all_to_alls(name, target):
    answer = compiled(name, target, **PREFILL)
    found = answer.as_dict()
    assert found["all_to_alls"] == 2 * LAYERS and found["merged"] == 0, answer.verdict
    if name == "standard":
        assert found["all_to_alls_hidden"] == found["hidden"] == 0, answer.verdict
    else:  # of 9 gathers and scatters the first and the last stand before and after all sublayers
        assert found["all_to_alls_hidden"] == 2 * LAYERS - 1 and found["hidden"] >= 2 * LAYERS - 1, answer.verdict


@pytest.mark.parametrize("target", ["v5p:2x2x2", *(pytest.param(t, marks=pytest.mark.full) for t in TARGETS[1:])])
def test_training_hides_all_of_the_body(target):
    """In both directions, gathers and scatters too. Around the loop are the first input's gather, the last combine, the
    gather of the head's input, and their transposes; the first turn exchanges zeros."""
    answer = compiled("ladder", target, **TRAIN)
    found = answer.report
    assert (found.all_to_alls, found.all_reduces, found.merged) == (4 * LAYERS + 2, 4 * LAYERS + 4, 0), answer.verdict
    body = [r for r in found.reductions if r.collective.executions > 1]
    assert sum(r.backward for r in body) == 4 == len(body) / 2
    assert all(r.status is Status.HIDDEN for r in body), answer.verdict


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_standard_hides_nothing_forward(target):
    """The control. Backward, gradients of weights stand beside some: they wait for no message."""
    forward = [r for r in compiled("standard", target, **TRAIN).report.reductions if not r.backward]
    assert sum(r.count for r in forward) == 4 * LAYERS + 1
    assert not any(r.status is Status.HIDDEN for r in forward)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "name, all_to_alls, hidden, others", [("standard", 8, 0, 17), ("ladder", 7, 13, 16), ("farskip", 7, 10, 12)]
)
def test_a_shared_expert_is_compute_for_standard(name, all_to_alls, hidden, others, target):
    """All of its all-to-alls, and none of its gathers and scatters."""
    found = compiled(name, target, model="qwen1.5-moe-a2.7b", **PREFILL).report
    assert (found.all_to_alls, found.all_reduces, found.merged) == (2 * LAYERS, others, 0), found.verdict
    assert found.all_to_alls_hidden >= all_to_alls and found.hidden >= hidden, found.verdict
    assert found.hidden == 0 or name != "standard", found.verdict


@pytest.mark.full
@pytest.mark.parametrize("name", ["ladder", "farskip"])
def test_training_with_a_shared_expert(name):
    """On tpu7x its gather took all of attention, and left nothing beside the rows' dispatch: there is an option."""
    found = compiled(name, "tpu7x:2x2x1", model="qwen1.5-moe-a2.7b", **TRAIN).report
    body = [r for r in found.reductions if r.collective.executions > 1]
    assert body and all(r.status is Status.HIDDEN for r in body), found.verdict
    assert (found.all_to_alls, found.merged) == (4 * LAYERS + 2, 0), found.verdict
