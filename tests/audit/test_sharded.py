"""What the compilers make of weights that are split over the fsdp axis, and of a stream split along
the sequence.

4 layers of Llama-3-70B over 8 devices, one row of 1024 tokens on each of the fsdp devices. See
`test_overlap.py`.
"""

import pytest

from ladder_jax.schedule.report import Status, hidden_bytes
from tests.audit.conftest import LAYERS, table

pytestmark = pytest.mark.audit

MATRICES = 7  # of a layer
# In a scan, the default: of 17 all-reduces how many are hidden at least, and which shares of the
# bytes of forward gathers, of backward gathers and of gradients' reduce-scatters. A compiler moves
# a gather beside the layer before, as far as it finds compute for its estimate of the transfer.
HIDDEN = {
    "v5p": (12, 0.9, 0.6, 0.9),
    "v6e": (12, 0.9, 0.6, 0.9),
    "tpu7x": (16, 0.9, 0.7, 0.7),
    "h100": (12, 0.5, 0.5, 0.7),
}
TRAIN = "--phase train --residual ladder --fsdp 2 | v5p:2x2x2 v6e:2x4 tpu7x:2x2x1 h100:8"
# No tensor parallelism: a reduce-scatter goes over all three sides of the torus.
ALONE = "--phase train --residual ladder --fsdp 8 --tensor 1 | v5p:2x2x2"
SPLIT = (
    "--phase prefill --residual ladder --sequence-parallel | v5p:2x2x2 v6e:2x4 tpu7x:2x2x1 h100:8"
)


@pytest.mark.parametrize("request_", table(TRAIN))
def test_weights_gradients_and_sums_are_hidden(request_, compiled):
    answer = compiled(request_)
    found, (sums, *least) = answer.report, HIDDEN[request_.target.kind]
    assert (found.all_reduces, found.merged) == (4 * LAYERS + 1, 0) and found.hidden >= sums, (
        answer.verdict
    )
    for moved in (found.gathers, found.scatters):
        assert sum(one.count for one in moved if one.backward) >= LAYERS * MATRICES
    forward, backward = (
        [one for one in found.gathers if one.backward is way] for way in (False, True)
    )
    shares = [round(hidden_bytes(moved), 3) for moved in (forward, backward, found.scatters)]
    assert all(mine >= floor for mine, floor in zip(shares, least, strict=True)), shares


@pytest.mark.parametrize("request_", table(ALONE, model="llama-3.2-1b"))
def test_gradients_are_hidden_without_tensor_parallelism(request_, compiled):
    """Most of their bytes: the last array's has what is left of a layer, which is too little."""
    body = [t for t in compiled(request_).report.scatters if t.collective.executions > 1]
    assert sum(t.count for t in body) == LAYERS * MATRICES
    assert not any(t.collective.synchronous for t in body)
    assert hidden_bytes(body) > 0.5  # each runs as often


@pytest.mark.parametrize("request_", table(SPLIT))
def test_both_halves_of_a_reduction_are_hidden(request_, compiled):
    """But for the first input, the last output and the head's input: before the one and after these
    is no sublayer.
    """
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS, 0)
    exposed = [
        (r.layer, r.sublayer) for r in answer.report.reductions if r.status is not Status.HIDDEN
    ]
    assert exposed == [("0", "attention"), ("last", ""), ("last", "")], answer.verdict
