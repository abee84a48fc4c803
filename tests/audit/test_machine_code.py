"""What only a whole compilation shows: costs, sizes, and failures once the order of operations is
final.

See `test_overlap.py`. Machine code takes nine tenths of a compiler's time for TPUs, so that the
other audits do without it: here one program a target and phase shows that it can be made, and
leaves the schedule as it was.
"""

import pytest

from ladder_jax.overlap import compile as compiling, result
from tests.audit.conftest import LAYERS, check, table

pytestmark = [pytest.mark.audit, pytest.mark.machine_code]


PROGRAMS = """
    --phase prefill --residual ladder | TPUS
    --phase decode --residual ladder | v5p:2x2x2
    --phase train --residual ladder --remat none | v5e:2x4 v6e:2x4
    --phase prefill --residual standard --sequence-parallel --collective-matmul ring --prompt-length 4096 | v5p:2x2x2
    --phase prefill --residual ladder --sequence-parallel --experts exchange --prompt-length 32768 \
        --model qwen3-30b-a3b | tpu7x:2x2x1
"""
READ = """
    --phase decode --residual standard | v5e:2x4 v5p:2x2x2 v6e:2x4 tpu7x:2x2x1 h100:8 b200:8*
    --phase decode --residual ladder | v5e:2x4 v5p:2x2x2* v6e:2x4 tpu7x:2x2x1 h100:8* b200:8*
"""


@pytest.mark.parametrize("request_", table(PROGRAMS))
def test_the_schedule_is_final_before_code_is_made(request_, compiled, monkeypatch, tmp_path):
    """Of training v5e's step runs out of vector memory most easily."""
    code = compiled(request_)
    assert code.record.bytes_per_device > 0
    monkeypatch.setenv("LADDER_JAX_CACHE", str(tmp_path))
    record = compiling.compiled(request_, early=True)
    assert record.bytes_per_device is None
    early = result.read(request_, record).report
    known = lambda one: (one.layer, one.sublayer, one.backward, one.status, one.window, one.count)
    assert [*map(known, early.reductions)] == [*map(known, code.report.reductions)]
    for name in ("hidden", "merged", "all_to_alls", "all_to_alls_hidden", "window_flops_fraction"):
        assert getattr(early, name) == getattr(code.report, name), name


@pytest.mark.parametrize("request_", table(READ))
def test_a_decode_step_reads_the_weights_and_the_cache_once(request_, compiled):
    """The mean of the token loop. v5e keeps a tenth of it in vector memory from one token to the
    next.
    """
    answer = compiled(request_)
    assert 0.9 < answer.bytes_accessed / answer.record.bytes_minimum <= 1.10
    # elsewhere it counts what is prefetched up to three times, or done once a call
    if request_.target.kind == "v5p":
        assert answer.record.bytes_accessed / answer.record.bytes_minimum < 1.15


@pytest.mark.parametrize("request_", table("--phase prefill --residual ladder | v5e:2x2"))
def test_options_that_fail_to_compile_are_replaced(request_, compiled):
    answer = compiled(request_)
    check(answer, hidden=2 * LAYERS - 1, all_reduces=2 * LAYERS)
    assert any("the compiler fails with" in notice for notice in answer.record.notices)
    assert "xla_tpu_scoped_vmem_limit_kib" in answer.record.options
