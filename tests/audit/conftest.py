"""Programs that are compiled for absent hardware, once a module, beside the tests that read
them.
"""

import concurrent.futures

import pytest

from ladder_jax.cli.main import _parser
from ladder_jax.config import Launch
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.overlap.compile import Until
from ladder_jax.schedule import targets

LAYERS = 4
TPUS = "v5e:2x4 v5p:2x2x2 v6e:2x4 tpu7x:2x2x1"
TARGETS = {"TPUS": TPUS, "ALL": f"{TPUS} h100:8 b200:8"}


def table(text, *, model="llama-3-70b"):
    """The parameters `request_` of rows "options of `ladder-jax overlap` | targets", and `counts`
    where there is a third column: how many all-reduces there are, of them hidden, and all-to-alls,
    of them hidden.

    A star is on targets, or TPUS and ALL, of `make audit-sample`.
    """
    found = []
    for row in filter(str.strip, text.splitlines()):
        words, targets, *expected = (cell.strip() for cell in row.split("|"))
        counts = [[int(count) for count in cell.split()] for cell in expected]
        for name in targets.split():
            marks = () if name.endswith("*") else pytest.mark.full
            for target in TARGETS.get(name.strip("*"), name.strip("*")).split():
                asked = f"overlap --model {model} --layers {LAYERS} {words} --target {target}"
                options = vars(_parser("overlap").parse_args(asked.split()))
                request = requests.make(**{name: options[name] for name in result.OPTIONS})
                found.append(pytest.param(request, *counts, id=f"{words} {target}", marks=marks))
    return found


def check(answer, all_reduces, hidden, all_to_alls=0, all_to_alls_hidden=0, *, window=0.8):
    """None is merged, and so many are hidden at least, or none at all where that is 0: a control.

    window: the least of a reduction that is launched in halves, in sublayers.
    """
    found = answer.report
    counts = found.all_reduces, found.all_to_alls, found.merged
    assert counts == (all_reduces, all_to_alls, 0), answer.verdict
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
