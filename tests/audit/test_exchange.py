"""What the compilers make of exchanged experts: a prefill of 1 x 32,768, 4 layers of Qwen3-30B-A3B over 8 devices.

See `test_overlap.py`. The last layer's combine has no compute after it.
"""

import pytest

from ladder_jax.config import ExpertParallelism, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from tests.audit.test_overlap import LAYERS, absent

pytestmark = pytest.mark.audit

TARGETS = ("v5p:2x2x2", "tpu7x:2x2x1", "h100:8")
SAMPLE = [("ladder", "v5p:2x2x2"), ("ladder", "h100:8"), ("standard", "h100:8")]
CASES = [
    pytest.param(name, target, marks=() if (name, target) in SAMPLE else pytest.mark.full)
    for name in ("ladder", "standard")
    for target in TARGETS
]


@pytest.mark.parametrize("name, target", CASES)
def test_all_to_alls(name, target):
    settings = dict(phase=Phase.PREFILL, layers=LAYERS, prompt_length=32768, sequence_parallel=True)
    exchange = dict(experts=ExpertParallelism.EXCHANGE)
    request = requests.make(model="qwen3-30b-a3b", target=target, residual=name, **settings, **exchange)
    if reason := absent(request):
        pytest.skip(reason)
    answer = result.read(request, compiling.compiled(request))
    found = answer.as_dict()
    assert found["all_to_alls"] == 2 * LAYERS and found["merged"] == 0, answer.verdict
    if name == "standard":
        assert found["all_to_alls_hidden"] == found["hidden"] == 0, answer.verdict
    else:  # of 9 gathers and scatters the first and the last stand before and after all sublayers
        assert found["all_to_alls_hidden"] == 2 * LAYERS - 1 and found["hidden"] >= 2 * LAYERS - 1, answer.verdict
