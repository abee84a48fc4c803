"""The walk over configurations: a fixed part of it, what it draws, and that it would see a wrong
computation.
"""

import pytest

from experiments.fuzz_configurations import __main__ as command, compare, walk
from experiments.fuzz_configurations.draw import CHECKS, draw, override
from ladder_jax.residual import recurrence
from tests.covering import full

SEED = 0


@pytest.mark.parametrize("indices", [(473,), full((39, 41, 70, 95, 99, 107))])
def test_every_case_computes_what_the_reference_does(indices):
    """By all kinds of comparisons."""
    met = list(walk.outcomes(draw(SEED, index) for index in indices))
    for case, outcome in met:
        assert outcome.what != "failed", command.failure(case, outcome)
    checks = command.compared(met)
    assert checks["gradients"] >= len(indices) / 2
    assert checks.keys() & set(CHECKS)
    assert indices != (473,) or checks.keys() >= set(CHECKS), checks


def test_a_wrong_residual_is_reported(monkeypatch):
    """Of a plain Ladder in float32 that makes no other comparison, with the command that repeats
    the case.
    """
    case = draw(SEED, 68)
    assert case.settings["model.residual"] == "ladder"
    assert not case.checks
    assert not case.drops
    add = recurrence.add
    monkeypatch.setattr(recurrence, "add", lambda x, outputs: add(1.001 * x, outputs))
    outcome = compare.outcome(case)
    assert outcome.what == "failed"
    assert "gradients: " in outcome.said
    text = command.failure(case, outcome)
    assert f"--case {case.seed}:{case.index}" in text
    assert "model.residual=ladder" in text


def test_draws():
    """Deterministic, and of each setting every value: of this seed 22 cases have them."""
    cases = [draw(74, index) for index in range(22)]
    assert cases[:3] == [draw(74, index) for index in range(3)]
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
