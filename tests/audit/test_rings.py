"""What the compilers make of collective matmuls: Standard's gathers and scatters under their own
matmuls.

4 layers of Llama-3-70B over 8 devices, a prefill of 4096 tokens. See `test_overlap.py`. Of the 17
collectives the last is the gather of the head's input.
"""

import pytest

from ladder_jax.config import CollectiveMatmul, Phase
from ladder_jax.schedule.report import Status
from tests.audit.conftest import LAYERS, case, check
from tests.audit.test_overlap import ALL

pytestmark = pytest.mark.audit

SAMPLE = ("v5p:2x2x2", CollectiveMatmul.RING), ("h100:8", CollectiveMatmul.RING)


def matmuls(target, form, residual="standard"):
    split = dict(sequence_parallel=True, collective_matmul=form, prompt_length=4096)
    full = (target, form) not in SAMPLE or residual != "standard"
    return case(target, Phase.PREFILL, residual, full=full, **split)


RINGS = [matmuls(target, CollectiveMatmul.RING) for target in ALL]
PLAIN = [matmuls(target, CollectiveMatmul.NONE) for target in ("v5p:2x2x2", "v6e:2x4")]
LADDERS = [
    matmuls(target, CollectiveMatmul.RING, "ladder")
    for target in ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8")
]


def statuses(answer) -> dict[str, list[bool]]:
    """Whether they are hidden: of the sublayers' inputs, of their outputs, and of the head's
    input.
    """
    found = {"input": [], "output": [], "head": []}
    for one in answer.report.reductions:
        end = "input" if "enter_sublayer_input" in one.collective.op_name else "output"
        found["head" if one.layer == "last" and end == "input" else end].append(
            one.status is Status.HIDDEN
        )
    return found


@pytest.mark.parametrize("request_", RINGS)
def test_rings_are_hidden_under_their_matmuls(request_, compiled):
    """But for attention's inputs on GPUs: XLA issues one of a ring's seven permutes behind the
    product of the queries, and beside it is only that of keys or values.
    """
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS + 1, 0)
    found = statuses(answer)
    assert found["head"] == [False] and len(found["input"]) == len(found["output"]) == 2 * LAYERS
    least = 14 if request_.target.platform == "tpu" else 12
    assert sum(found["input"] + found["output"]) >= least, answer.verdict


@pytest.mark.parametrize("request_", PLAIN)
def test_without_collective_matmuls_standard_hides_nothing(request_, compiled):
    """The control."""
    check(compiled(request_), all_reduces=4 * LAYERS + 1, hidden=0)


@pytest.mark.parametrize("request_", LADDERS)
def test_a_ladders_first_input_and_last_output_are_rings(request_, compiled):
    """So that only the head's input is left."""
    answer = compiled(request_)
    found = statuses(answer)
    # The second sublayer reads the same stream as the first, but its gather is no part of a matmul:
    # one more.
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS + 1, 0)
    assert (sum(found["input"] + found["output"]), found["head"]) == (4 * LAYERS, [False]), (
        answer.verdict
    )
