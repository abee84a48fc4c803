"""Programs that are compiled for absent hardware, once a module, beside the tests that read
them.
"""

import concurrent.futures

import pytest

from ladder_jax.config import Launch, Loop, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Until
from ladder_jax.schedule import targets

LAYERS = 4
SERVING = (Phase.PREFILL, Phase.DECODE)


def case(
    target, phase, residual="ladder", loop=Loop.UNROLLED, *, model="llama-3-70b", full, **more
):
    """A parameter `request_`. full: whether `make audit-sample` leaves it out."""
    settings = dict(target=target, phase=phase, residual=residual, loop=loop, **more)
    request = requests.make(model=model, layers=LAYERS, **settings)
    named = (f"{k}={getattr(v, 'value', v)}" for k, v in more.items())
    words = (model, residual, phase.value, request.loop.value, *named, target)
    return pytest.param(request, id="-".join(words), marks=pytest.mark.full if full else ())


def counted(cases, **counts):
    """These parameters `request_` with what `check` expects of each, as the parameter `counts`."""
    return [pytest.param(*one.values, counts, id=one.id, marks=one.marks) for one in cases]


def check(answer, *, all_reduces, hidden, all_to_alls=0, all_to_alls_hidden=0, window=0.8):
    """None is merged, and so many are hidden at least, or none at all where that is 0: a control.

    window: the least of a reduction that is launched in halves, in sublayers.
    """
    found = answer.report
    assert (found.all_reduces, found.all_to_alls, found.merged) == (all_reduces, all_to_alls, 0), (
        answer.verdict
    )
    assert found.hidden >= hidden and found.all_to_alls_hidden >= all_to_alls_hidden, answer.verdict
    assert hidden or not found.hidden, answer.verdict
    assert all_to_alls_hidden or not found.all_to_alls_hidden, answer.verdict
    if hidden and answer.record.launch == Launch.EXPLICIT.value:
        assert found.window_flops_fraction["least"] >= window, found.window_flops_fraction


@pytest.fixture(scope="module")
def programs(request):
    """Compiles what the module's chosen tests have as `request_`, in their order; a function that
    waits for one.
    """
    items = [
        item
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    params = [(item.callspec.params.get("request_"), until(item)) for item in items]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        records = {}

        def begin(one, far):
            if (one, far) not in records:
                records[one, far] = pool.submit(compiling.compiled, one, until=far)
            return records[one, far]

        for one, far in params:
            if one is not None and not absent(one):
                begin(one, far)
        yield lambda one, far: result.read(one, begin(one, far).result())
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def compiled(request, programs):
    """A function of a request: what `ladder-jax overlap` answers, without costs and sizes but in
    tests of machine code.

    The order of operations is final before machine code is made (tests/audit/test_machine_code.py),
    which takes nine tenths of a compiler's time for TPUs.
    """

    def wait(one):
        if reason := absent(one):
            pytest.skip(reason)  # what `ladder-jax doctor` says of this machine
        return programs(one, until(request.node))

    return wait


def until(item):
    """How far a test's programs are compiled."""
    return Until.CODE if item.get_closest_marker("machine_code") else Until.SCHEDULE


def absent(request):
    """TPU targets are always compiled for; GPU targets where the plugin is installed."""
    return request.target.platform == "cuda" and targets.not_installed(request.target)
