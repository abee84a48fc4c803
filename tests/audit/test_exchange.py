"""What the compilers make of exchanged experts, of 32,768 tokens, 4 layers over 8 devices:
Qwen3-30B-A3B, and Qwen1.5-MoE-A2.7B, which has a shared expert.

See `test_overlap.py`. The last layer's combine has no compute after it, nor backward its transpose
any before it.
"""

import pytest

from tests.audit.conftest import (
    LAYERS,
    all_hidden,
    body,
    check,
    check_nothing_hidden_forward,
    table,
)

pytestmark = pytest.mark.audit

QWEN3 = "qwen3-30b-a3b"
QWEN1 = "qwen1.5-moe-a2.7b"
TARGETS = "v5p:2x2x2 tpu7x:2x2x1 h100:8 v6e:2x4"
SAMPLED = "v5p:2x2x2* tpu7x:2x2x1 h100:8 v6e:2x4"
PREFILL = "--phase prefill --sequence-parallel --experts exchange --prompt-length"
TRAIN = "--phase train --sequence-parallel --experts exchange --batch"
# Gathers and scatters: the first and the last stand before and after all sublayers. Standard in two
# halves hides all but the last layer's combine of the later half.
COUNTS = f"""
    {PREFILL} 32768 --residual ladder | v5p:2x2x2* tpu7x:2x2x1 h100:8* v6e:2x4 | 9 7 8 7
    {PREFILL} 32768 --residual standard | v5p:2x2x2 tpu7x:2x2x1 h100:8* v6e:2x4 | 9 0 8 0
    {PREFILL} 4096 --residual standard --batch 2 --interleave 2 | {SAMPLED} | 17 15 16 15
"""
# For Standard a shared expert is compute that hides all of its all-to-alls, and none of its gathers
# and scatters.
SHARED = f"""
    {PREFILL} 32768 --residual standard | {TARGETS} | 17 0 8 8
    {PREFILL} 32768 --residual ladder | {TARGETS} | 16 13 8 7
    {PREFILL} 32768 --residual farskip | {TARGETS} | 12 10 8 7
"""
TRAINED = f"{TRAIN} 8 --prompt-length 4096 --residual ladder | {SAMPLED}"
STANDARD = f"{TRAIN} 8 --prompt-length 4096 --residual standard | {TARGETS}"
IN_HALVES = f"{TRAIN} 2 --prompt-length 2048 --residual standard --interleave 2 | v5p:2x2x2 h100:8"
SHARED_TRAINED = f"""
    {TRAIN} 8 --prompt-length 4096 --residual ladder | tpu7x:2x2x1
    {TRAIN} 8 --prompt-length 4096 --residual farskip | tpu7x:2x2x1
"""


@pytest.mark.parametrize(
    "request_, counts", table(COUNTS, model=QWEN3) + table(SHARED, model=QWEN1)
)
def test_counts(request_, counts, compiled):
    answer = compiled(request_)
    check(answer, *counts)
    assert answer.report.all_to_alls_hidden == counts[3], answer.verdict


@pytest.mark.parametrize("request_", table(TRAINED, model=QWEN3))
def test_training_hides_all_of_the_body(request_, compiled):
    """In both directions, gathers and scatters too. Around the loop are the first input's gather,
    the last combine, the gather of the head's input, and their transposes; the first turn exchanges
    zeros.
    """
    found = compiled(request_).report
    counts = found.all_to_alls, found.all_reduces, found.merged
    assert counts == (4 * LAYERS + 2, 4 * LAYERS + 4, 0), found.verdict
    assert sum(r.backward for r in body(found)) == 4 == len(body(found)) / 2
    assert all_hidden(found), found.verdict


@pytest.mark.parametrize("request_", table(IN_HALVES, model=QWEN3))
def test_standard_in_halves_hides_all_of_a_training_step_s_body(request_, compiled):
    found = compiled(request_).report
    counts = found.all_to_alls, found.all_reduces, found.merged
    assert counts == (8 * LAYERS + 2, 8 * LAYERS + 4, 0), found.verdict
    assert sum(r.count for r in body(found)) == 16 * LAYERS and all_hidden(found), found.verdict


@pytest.mark.parametrize("request_", table(STANDARD, model=QWEN3))
def test_standard_hides_nothing_forward(request_, compiled):
    check_nothing_hidden_forward(compiled(request_), 4 * LAYERS + 1)


@pytest.mark.parametrize("request_", table(SHARED_TRAINED, model=QWEN1))
def test_training_with_a_shared_expert(request_, compiled):
    """On tpu7x its gather took all of attention, and left nothing beside the rows' dispatch: there
    is an option.
    """
    found = compiled(request_).report
    assert body(found) and all_hidden(found), found.verdict
    assert (found.all_to_alls, found.merged) == (4 * LAYERS + 2, 0), found.verdict
