"""What the compilers make of two halves in turn: 4 layers of Llama-3-70B as they are, Standard,
over 8 devices.

A whole batch hides none: the control is in test_overlap.py. See there for how programs are
compiled.
"""

import pytest

from ladder_jax.config import Loop, Phase
from tests.audit.conftest import LAYERS
from tests.audit.test_overlap import IN_HALVES, case

pytestmark = pytest.mark.audit

ONE_ROW = dict(interleave=2, batch=1, prompt_length=4096)  # halves of its sequence
# Of 33 all-reduces of a scanned training step, and 16 of an unrolled prefill. The last one is
# always exposed.
HIDDEN = {
    ("v5e", Phase.TRAIN): 32,
    ("v5p", Phase.TRAIN): 32,
    ("v6e", Phase.TRAIN): 32,
    ("tpu7x", Phase.TRAIN): 32,
    ("h100", Phase.TRAIN): 32,
    ("v5p", Phase.PREFILL): 15,
    ("h100", Phase.PREFILL): 15,
}
CASES = [
    *(
        case(target, Phase.TRAIN, "standard", Loop.SCAN, **IN_HALVES)
        for target in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8")
    ),
    *(case(target, Phase.PREFILL, "standard", **IN_HALVES) for target in ("v5p:2x2x2", "h100:8")),
    *(case(target, Phase.PREFILL, "standard", **ONE_ROW) for target in ("v5p:2x2x2", "h100:8")),
]


@pytest.mark.parametrize("request_", CASES)
def test_a_model_as_it_is_hides_its_sums(request_, compiled):
    answer = compiled(request_)
    sums = 8 * LAYERS + 1 if request_.phase is Phase.TRAIN else 4 * LAYERS
    assert (answer.report.all_reduces, answer.report.merged) == (sums, 0)
    assert answer.report.hidden >= HIDDEN[request_.target.kind, request_.phase], answer.verdict


@pytest.mark.full
@pytest.mark.parametrize("target", ["v5p:2x2x2", "tpu7x:2x2x1", "h100:8"])
def test_a_split_stream_hides_its_gathers_and_scatters(target, compiled):
    """All 64 in the layers."""
    training = dict(
        phase=Phase.TRAIN, residual="standard", loop=Loop.SCAN, sequence_parallel=True, **IN_HALVES
    )
    answer = compiled(case(target, **training).values[0])
    assert (answer.report.all_reduces, answer.report.merged) == (16 * LAYERS + 6, 0)
    assert answer.report.hidden >= 16 * LAYERS, answer.verdict
