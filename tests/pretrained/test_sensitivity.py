"""Layers by what they cost: losses of the dense reference, the choices that follow from them, and
the verb.
"""

import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from ladder_jax import pretrained
from ladder_jax.cli import main
from ladder_jax.errors import RunFailed
from ladder_jax.pretrained import convert
from ladder_jax.pretrained.sensitivity import Probe, best, measure
from ladder_jax.pretrained.sublayers import programs
from tests import cases, reference
from tests.covering import full
from tests.pretrained.least_squares import as_source

ROWS = cases.tokens((3, 25), seed=3)


def check_losses(definition, params, shape, *subsets):
    """A probe's, with any subset of layers converted, are the reference's."""
    probe = Probe(definition, as_source(params, definition.config), ROWS)
    for chosen in subsets:
        of = dataclasses.replace(shape, ladder=chosen)
        expected = reference.evaluate(reference.loss, params, ROWS, of)
        assert probe.loss(chosen) == pytest.approx(expected, rel=2e-5), chosen


@pytest.mark.parametrize(
    "name, ranks, tensor",
    [
        ("ladder", 1, 1),
        ("ladder-3", 1, 1),
        ("parallel-ladder", 1, 1),
        full("ladder-fresh", 2, 1),
        ("ladder-fresh", 2, 2),
    ],
)
def test_losses_of_any_subset_are_the_references(name, ranks, tensor):
    """One compilation for all: the layers are values at run time. The last case has real ranks."""
    definition = cases.define(name, ranks=ranks, tensor=tensor)
    shape = cases.shape(name, definition.config, ranks=ranks)
    subsets = (), (0, 2), (1, 2, 3), (0, 1, 2, 3)
    check_losses(definition, cases.parameters(definition), shape, *subsets)
    attention, mlp = programs(definition).advance["layers"]
    assert attention.__wrapped__._cache_size() == mlp.__wrapped__._cache_size() == 1


def test_prefixes_are_shared_and_the_choices_are_the_best():
    """Every loss equals the one of its subset from the beginning; ranked and greedy are what these
    losses say.
    """
    definition = cases.define("ladder")
    source = as_source(cases.parameters(definition), definition.config)
    probe = Probe(definition, source, ROWS)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(4), size) for size in (0, 1, 2)
    )
    losses = {chosen: probe.loss(chosen) for chosen in subsets}
    near = lambda *chosen: pytest.approx(losses[tuple(sorted(chosen))], rel=1e-6)
    assert dict(probe.losses_with((1,))) == {n: near(1, n) for n in (0, 2, 3)}
    result = measure(definition, source, ROWS, choose=2)
    assert (result["loss"], result["tokens"]) == (near(), 3 * 24)
    assert [row["loss"] for row in result["curve"]] == [near(n) for n in range(4)]
    first, second, *_ = sorted(range(4), key=lambda n: losses[n,])
    others = [n for n in range(4) if n != first]
    next_best = min(others, key=lambda n: losses[tuple(sorted((first, n)))])
    orders = {"last": [2, 3], "ranked": [first, second], "greedy": [first, next_best]}
    for name, order in orders.items():
        assert (result[name]["order"], result[name]["loss"]) == (order, near(*order))


def test_losses_that_are_no_numbers():
    definition = cases.define("ladder")
    params = cases.parameters(definition)
    params["final_norm"]["scale"][0] = np.nan
    with pytest.raises(RunFailed, match="the loss with ladder layers 0, is no number"):
        measure(definition, as_source(params, definition.config), ROWS, choose=1)


def test_the_better_choice_is_taken():
    chosen = lambda **losses: best({name: {"loss": loss} for name, loss in losses.items()})
    assert chosen(last=1.5, ranked=1.4, greedy=1.3) == "greedy"
    assert chosen(last=1.5, ranked=1.4, greedy=1.4) == "ranked"
    assert chosen(last=1.2, ranked=1.4, greedy=1.3) == "last"  # the layers interact


def test_the_verb_measures_prints_and_converts(small, tmp_path, capsys, monkeypatch):
    """On as many tokens as are asked for, also where that is more than the default."""
    monkeypatch.setattr(convert, "MEASURED_TOKENS", 48)
    text = tmp_path / "text.txt"
    text.write_text("the thin cat sat there then, with that other thing; " * 12)
    out = tmp_path / "out"
    words = ["--ladder-layers", "auto:2", "--calibration-tokens", "64", "--refit", "none"]
    assert main(["convert", str(small), str(out), "--calibration", str(text), *words]) == 0
    printed = capsys.readouterr()
    stored = json.loads((out / "sensitivity.json").read_text())
    assert (stored["tokens"], stored["sequence"]) == (64, 64)
    assert f"{stored['chosen']!r} costs least: " in printed.out
    assert f"over the standard model's {stored['loss']:.4f}" in printed.out
    assert "measured 7/7 losses" in printed.err
    assert [row["layer"] for row in stored["curve"]] == [0, 1, 2, 3]
    assert set(os.listdir(out)) == {"checkpoints", "sensitivity.json", "tokenizer"}
    chosen = stored[stored["chosen"]]["layers"]
    model = pretrained.open(out).model
    assert (model.residual, model.ladder_layers) == ("ladder", "".join(f"{n}," for n in chosen))
