"""What the compilers make of exchanged experts, of 32,768 tokens, 4 layers over 8 devices:
Qwen3-30B-A3B, and Qwen1.5-MoE-A2.7B, which has a shared expert.

See `test_overlap.py`. The last layer's combine has no compute after it, nor backward its transpose
any before it.
"""

import pytest

from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.schedule.report import Status
from tests.audit.conftest import LAYERS, case, check, counted

pytestmark = pytest.mark.audit

TARGETS = ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8", "v6e:2x4")
SAMPLE = {("ladder", "v5p:2x2x2"), ("ladder", "h100:8"), ("standard", "h100:8")}
PREFILL, TRAIN = dict(prompt_length=32768), dict(batch=8, prompt_length=4096)


def exchanged(target, name="ladder", *, model="qwen3-30b-a3b", trains=False, full=True, **more):
    split = dict(sequence_parallel=True, experts=ExpertParallelism.EXCHANGE)
    phase, shape = (Phase.TRAIN, TRAIN) if trains else (Phase.PREFILL, PREFILL)
    return case(
        target, phase, name, model=model, loop=None, full=full, **split, **{**shape, **more}
    )


def in_halves(target, *, full, tokens, **settings):
    shape = dict(batch=2, prompt_length=tokens, interleave=2)
    return exchanged(target, "standard", full=full, **shape, **settings)


TRAINED = [exchanged(target, trains=True, full=target != "v5p:2x2x2") for target in TARGETS]
STANDARD = [exchanged(target, "standard", trains=True) for target in TARGETS]
IN_HALVES = [in_halves(target, tokens=4096, full=target != "v5p:2x2x2") for target in TARGETS]
TRAINED_IN_HALVES = [
    in_halves(target, tokens=2048, trains=True, full=True) for target in ("v5p:2x2x2", "h100:8")
]
WITH_SHARED = dict(model="qwen1.5-moe-a2.7b")
SHARED_TRAINED = [
    exchanged("tpu7x:2x2x1", name, trains=True, **WITH_SHARED) for name in ("ladder", "farskip")
]


def of_kind(name):
    return [exchanged(target, name, full=(name, target) not in SAMPLE) for target in TARGETS]


def shared(name):
    return [exchanged(target, name, **WITH_SHARED) for target in TARGETS]


# Gathers and scatters: the first and the last stand before and after all sublayers.
COUNTS = [
    *counted(of_kind("ladder"), all_reduces=9, hidden=7, all_to_alls=8, all_to_alls_hidden=7),
    *counted(of_kind("standard"), all_reduces=9, hidden=0, all_to_alls=8),
    # The same model in two halves: all but the last layer's combine of the later half.
    *counted(IN_HALVES, all_reduces=17, hidden=15, all_to_alls=16, all_to_alls_hidden=15),
    # For Standard a shared expert is compute that hides all of its all-to-alls, and none of its
    # gathers and scatters.
    *counted(shared("standard"), all_reduces=17, hidden=0, all_to_alls=8, all_to_alls_hidden=8),
    *counted(shared("ladder"), all_reduces=16, hidden=13, all_to_alls=8, all_to_alls_hidden=7),
    *counted(shared("farskip"), all_reduces=12, hidden=10, all_to_alls=8, all_to_alls_hidden=7),
]


@pytest.mark.parametrize("request_, counts", COUNTS)
def test_counts(request_, counts, compiled):
    answer = compiled(request_)
    check(answer, **counts)
    assert answer.report.all_to_alls_hidden == counts.get("all_to_alls_hidden", 0), answer.verdict


@pytest.mark.parametrize("request_", TRAINED)
def test_training_hides_all_of_the_body(request_, compiled):
    """In both directions, gathers and scatters too. Around the loop are the first input's gather,
    the last combine, the gather of the head's input, and their transposes; the first turn exchanges
    zeros.
    """
    found = compiled(request_).report
    assert (found.all_to_alls, found.all_reduces, found.merged) == (
        4 * LAYERS + 2,
        4 * LAYERS + 4,
        0,
    ), found.verdict
    body = [r for r in found.reductions if r.collective.executions > 1]
    assert sum(r.backward for r in body) == 4 == len(body) / 2
    assert all(r.status is Status.HIDDEN for r in body), found.verdict


@pytest.mark.parametrize("request_", TRAINED_IN_HALVES)
def test_standard_in_halves_hides_all_of_a_training_step_s_body(request_, compiled):
    found = compiled(request_).report
    assert (found.all_to_alls, found.all_reduces, found.merged) == (
        8 * LAYERS + 2,
        8 * LAYERS + 4,
        0,
    ), found.verdict
    body = [r for r in found.reductions if r.collective.executions > 1]
    assert sum(r.count for r in body) == 16 * LAYERS and all(
        r.status is Status.HIDDEN for r in body
    ), found.verdict


@pytest.mark.parametrize("request_", STANDARD)
def test_standard_hides_nothing_forward(request_, compiled):
    """The control. Backward, gradients of weights stand beside some: they wait for no message."""
    forward = [r for r in compiled(request_).report.reductions if not r.backward]
    assert sum(r.count for r in forward) == 4 * LAYERS + 1
    assert not any(r.status is Status.HIDDEN for r in forward)


@pytest.mark.parametrize("request_", SHARED_TRAINED)
def test_training_with_a_shared_expert(request_, compiled):
    """On tpu7x its gather took all of attention, and left nothing beside the rows' dispatch: there
    is an option.
    """
    found = compiled(request_).report
    body = [r for r in found.reductions if r.collective.executions > 1]
    assert body and all(r.status is Status.HIDDEN for r in body), found.verdict
    assert (found.all_to_alls, found.merged) == (4 * LAYERS + 2, 0), found.verdict
