"""The walk over configurations: a fixed part of it, what it draws, and that it would see a wrong
computation.
"""

import pytest

from experiments.fuzz_configurations import __main__ as command, compare, walk
from experiments.fuzz_configurations.draw import CHECKS, draw, override
from ladder_jax.errors import UserError
from ladder_jax.residual import recurrence

SEED = 0


@pytest.mark.parametrize(
    "indices", [(473,), pytest.param((39, 41, 70, 95, 99, 107), marks=pytest.mark.full)]
)
def test_every_case_computes_what_the_reference_does(indices):
    """By all kinds of comparisons."""
    met = list(walk.outcomes(draw(SEED, index) for index in indices))
    for case, outcome in met:
        assert outcome.what != "failed", command.failure(case, outcome)
    checks = command.compared(met)
    assert checks["gradients"] >= len(indices) / 2
    assert checks.keys() & set(CHECKS)
    assert indices != (473,) or checks.keys() >= set(CHECKS), checks


def found():
    """What is said of a plain Ladder in float32 that makes no other comparison."""
    case = draw(SEED, 68)
    assert case.settings["model.residual"] == "ladder"
    assert not case.checks
    assert not case.drops
    return case, compare.outcome(case)


def test_a_wrong_residual_is_reported(monkeypatch):
    """With the command that repeats the case."""
    add = recurrence.add
    monkeypatch.setattr(recurrence, "add", lambda x, outputs: add(1.001 * x, outputs))
    case, outcome = found()
    assert outcome.what == "failed"
    assert "gradients: " in outcome.said
    text = command.failure(case, outcome)
    assert f"--case {case.seed}:{case.index}" in text
    assert "model.residual=ladder" in text


def test_a_crash_is_reported_and_a_refusal_is_not(monkeypatch):
    def crash(*args, **settings):
        raise ZeroDivisionError("of a program")

    monkeypatch.setattr(compare.Program, "begin", crash)
    case, outcome = found()
    assert outcome.what == "failed"
    assert "ZeroDivisionError: of a program" in outcome.said
    assert " crash" in outcome.said

    def refuse(*args, **settings):
        raise UserError("4 is not 3")

    monkeypatch.setattr(compare.Program, "begin", refuse)
    case, outcome = found()
    assert outcome.what == "refused"
    assert outcome.said == "4 is not 3"
    assert command.refusals([(case, outcome)]).split(maxsplit=1) == ["1", "N is not N"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--case", "7"], "--case: must be a whole number of at least 0, not ''"),
        (["--case", "7:-1"], "--case: must be a whole number of at least 0, not '-1'"),
        (["-1"], "seed: must be a whole number of at least 0, not '-1'"),
    ],
)
def test_what_is_no_case_is_refused(monkeypatch, capsys, words, said):
    """A negative seed's cases all failed, with NumPy's words."""
    monkeypatch.setattr(walk.sys, "argv", ["fuzz_configurations", *words])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert f"argument {said}" in capsys.readouterr().err


def test_a_process_that_dies_is_reported(monkeypatch, tmp_path, capsys):
    """Each of its cases, with the command that repeats it; the walk goes on, and its status is
    1.
    """
    worker = tmp_path / "worker"
    worker.write_text("#!/bin/sh\necho out of luck >&2\nkill -6 $$\n")
    worker.chmod(0o755)
    monkeypatch.setattr(walk.sys, "executable", str(worker))
    monkeypatch.setattr(walk.sys, "argv", ["fuzz_configurations", "7", "2"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    for case in ("7:0", "7:1"):
        told = f"--case {case} failed: the process ended with status -6:\n  out of luck"
        assert f"python -m experiments.fuzz_configurations {told}" in printed
    assert "2 cases: 0 ran, 0 refused, 2 failed" in printed


def test_draws():
    """Deterministic, and of each setting every value: of this seed thirty cases have them."""
    cases = [draw(8, index) for index in range(30)]
    assert cases[:3] == [draw(8, index) for index in range(3)]
    assert cases[0] != draw(2, 0)
    drawn = lambda name: {str(case.settings[name]) for case in cases if name in case.settings}
    settings = [("a.b", None), ("a", True), ("a", 2.0)]
    # as on the command line
    assert list(map(override, settings)) == ["a.b=null", "a=true", "a=2.0"]
    assert drawn("train.remat") == {"none", "full", "save-matmuls", "offload"}
    assert {"farskip", "desync-3", "ladder-fresh", "no-communication"} <= drawn("model.residual")
    assert drawn("mesh.experts") == {"exchange"}
    assert {"2", "[1]"} <= drawn("model.ladder_layers")
    assert len(drawn("model.ranks")) >= 4
    assert {case.batch for case in cases} == {"plain", "packed", "masked"}
    assert {check for case in cases for check in case.checks} == set(CHECKS)
