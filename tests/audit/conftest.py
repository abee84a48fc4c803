"""Programs that are compiled for absent hardware, and what is expected of them."""

import pytest

from ladder_jax.cli.main import parse
from ladder_jax.config import Launch
from ladder_jax.overlap import compile as compiling, request as requests, result
from ladder_jax.schedule import targets
from ladder_jax.schedule.report import Status

LAYERS = 4
TPUS = "v5e:2x4 v5p:2x2x2 v6e:2x4 tpu7x:2x2x1"
TARGETS = {"TPUS": TPUS, "ALL": f"{TPUS} h100:8 b200:8"}


def pytest_ignore_collect(config):
    """`make test` runs none of these, and each of its workers would read them all."""
    return "not audit" in config.option.markexpr or None


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
                options = vars(parse(asked.split()))
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


def check_nothing_hidden_forward(answer, reductions):
    """The control: of so many. Backward, gradients of weights stand beside some: they wait for no
    message.
    """
    forward = [r for r in answer.report.reductions if not r.backward]
    assert sum(r.count for r in forward) == reductions
    assert not any(r.status is Status.HIDDEN for r in forward)


def body(found):
    """The reductions and all-to-alls of the loops' bodies."""
    return [r for r in found.reductions if r.collective.executions > 1]


def all_hidden(found):
    return all(r.status is Status.HIDDEN for r in body(found))


@pytest.fixture
def compiled(request):
    """A function of a request: what `ladder-jax overlap` answers, without costs and sizes but in
    tests of machine code.

    The order of operations is final before machine code is made (tests/audit/test_machine_code.py),
    which takes nine tenths of a compiler's time for TPUs.
    """
    whole = request.node.get_closest_marker("machine_code")

    def answer(one):
        # TPU targets are always compiled for; GPU targets where the plugin is installed
        if one.target.platform == "cuda" and (reason := targets.not_installed(one.target)):
            pytest.skip(reason)  # what `ladder-jax doctor` says of this machine
        return result.read(one, compiling.compiled(one, early=not whole))

    return answer
