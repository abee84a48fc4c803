"""What the compilers make of two halves in turn: 4 layers of Llama-3-70B as they are, Standard,
over 8 devices.

A whole batch hides none: the control is in test_overlap.py. See there for how programs are
compiled.
"""

import pytest

from tests.audit.conftest import LAYERS, check, table

pytestmark = pytest.mark.audit

# Of 33 all-reduces of a scanned training step, and 16 of an unrolled prefill, the last one is always
# exposed. One row is halved along its sequence.
COUNTS = """
    --phase train --residual standard --interleave 2 --batch 2 --prompt-length 2048 | TPUS h100:8* | 33 32
    --phase prefill --residual standard --interleave 2 --batch 2 --prompt-length 2048 | v5p:2x2x2* h100:8 | 16 15
    --phase prefill --residual standard --interleave 2 --batch 1 --prompt-length 4096 | v5p:2x2x2 h100:8 | 16 15
"""
SPLIT = "--phase train --residual standard --interleave 2 --batch 2 --prompt-length 2048 --sequence-parallel"


@pytest.mark.parametrize("request_, counts", table(COUNTS))
def test_a_model_as_it_is_hides_its_sums(request_, counts, compiled):
    check(compiled(request_), *counts, window=0)


@pytest.mark.parametrize("request_", table(f"{SPLIT} | v5p:2x2x2 tpu7x:2x2x1 h100:8"))
def test_a_split_stream_hides_its_gathers_and_scatters(request_, compiled):
    """All 64 in the layers."""
    check(compiled(request_), all_reduces=16 * LAYERS + 6, hidden=16 * LAYERS)
