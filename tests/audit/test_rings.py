"""What the compilers make of collective matmuls: Standard's gathers and scatters under their own
matmuls.

4 layers of Llama-3-70B over 8 devices, a prefill of 4096 tokens. See `test_overlap.py`. Of the 17
collectives the last is the gather of the head's input.
"""

import pytest

from ladder_jax.schedule.report import Status
from tests.audit.conftest import LAYERS, table

pytestmark = pytest.mark.audit

# without a ring it hides nothing: test_overlap.py
SPLIT = "--phase prefill --prompt-length 4096 --sequence-parallel"
RINGS = f"{SPLIT} --residual standard --collective-matmul ring"
LADDERS = f"{SPLIT} --residual ladder --collective-matmul ring | v5p:2x2x2 tpu7x:2x2x1 h100:8"


def statuses(answer):
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


@pytest.mark.parametrize(
    "request_", table(f"{RINGS} | v5e:2x4 v5p:2x2x2* v6e:2x4 tpu7x:2x2x1 h100:8* b200:8")
)
def test_rings_are_hidden_under_their_matmuls(request_, compiled):
    """But for attention's inputs on GPUs: XLA issues one of a ring's seven permutes behind the
    product of the queries, and beside it is only that of keys or values.
    """
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS + 1, 0)
    found = statuses(answer)
    assert found["head"] == [False]
    assert len(found["input"]) == len(found["output"]) == 2 * LAYERS
    least = 14 if request_.target.platform == "tpu" else 12
    assert sum(found["input"] + found["output"]) >= least, answer.verdict


@pytest.mark.parametrize("request_", table(LADDERS))
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
