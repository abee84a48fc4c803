"""Layers by what they cost: losses of the dense reference, the choices that follow from them, and
the verb.
"""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

from ladder_jax import checkpoint, nn, parallel, pretrained
from ladder_jax.cli import main
from ladder_jax.pretrained.convert import Text, rows_of
from ladder_jax.pretrained.sensitivity import Probe, Result, Subset, measure
from ladder_jax.pretrained.sublayers import programs
from tests import reference
from tests.pretrained.test_refit import loss

ROWS = np.random.default_rng(3).integers(3, 129, (3, 25)).astype(np.int32)
TEXT = "the thin cat sat there then, with that other thing; " * 12


@pytest.fixture(scope="module")
def source(small):
    return pretrained.open(small)


def probe(source, residual, *, ranks=None, tensor=1):
    model = dataclasses.replace(source.model, residual=residual, ranks=ranks)
    mesh = parallel.make_mesh(tensor=tensor)
    definition = nn.define(model, mesh=mesh)
    return definition, pretrained.load(source, mesh=mesh), Probe(definition, source, ROWS)


def expected(params, chosen, *, kind, number=1, ranks=1):
    shape = reference.Shape(
        layers=4,
        heads=4,
        kv_heads=4,
        vocab=129,
        kind=kind,
        number=number,
        ladder=tuple(chosen),
        ranks=ranks,
    )
    rows = 129 + -129 % (128 * ranks)  # what the reference splits over its ranks
    pad = lambda table: np.pad(np.asarray(table)[:129], ((0, rows - 129), (0, 0)))
    plain = jax.tree.map(np.asarray, params)
    plain |= {
        name: {"table": pad(plain[name]["table"]).astype(np.float64)}
        for name in ("embedding", "head")
    }
    return reference.loss_eagerly(plain, ROWS, shape)


@pytest.mark.parametrize(
    "residual, kind, number, ranks, tensor",
    [
        ("ladder", "ladder", 1, None, 1),
        ("ladder-3", "ladder", 3, None, 1),
        ("parallel-ladder", "parallel-ladder", 1, None, 1),
        pytest.param("ladder-fresh", "fresh", 1, 2, 1, marks=pytest.mark.full),
        ("ladder-fresh", "fresh", 1, 2, 2),
    ],
)
def test_losses_of_any_subset_are_the_references(residual, kind, number, ranks, tensor, source):
    """One compilation for all: the layers are values at run time. The last case has real ranks."""
    definition, params, probed = probe(source, residual, ranks=ranks, tensor=tensor)
    told = dict(kind=kind, number=number, ranks=ranks or 1)
    for chosen in ((), (0, 2), (1, 2, 3), (0, 1, 2, 3)):
        assert probed.loss(chosen) == pytest.approx(expected(params, chosen, **told), rel=2e-5)
    assert [program._cache_size() for program in programs(definition).advance["layers"]] == [1, 1]


def test_prefixes_are_shared_and_the_choices_are_the_best(source):
    """Every loss equals the one of its subset from the beginning; ranked and greedy are what these
    losses say.
    """
    definition, _, probed = probe(source, "ladder")
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(4), size) for size in (0, 1, 2)
    )
    losses = {chosen: probed.loss(chosen) for chosen in subsets}
    near = lambda *chosen: pytest.approx(losses[tuple(sorted(chosen))], rel=1e-6)
    assert dict(probed.losses_with((1,))) == {n: near(1, n) for n in (0, 2, 3)}
    result = measure(definition, source, ROWS, choose=2)
    assert (result.loss, result.tokens) == (near(), 3 * 24)
    assert list(result.alone) == [near(n) for n in range(4)]
    first, second, *_ = sorted(range(4), key=lambda n: losses[n,])
    others = [n for n in range(4) if n != first]
    best = min(others, key=lambda n: losses[tuple(sorted((first, n)))])
    orders = {"last": (2, 3), "ranked": (first, second), "greedy": (first, best)}
    assert result.subsets == {name: Subset(order, near(*order)) for name, order in orders.items()}


def test_the_better_choice_is_taken():
    def result(last, ranked, **greedy):
        subsets = {"last": Subset((1, 2), last), "ranked": Subset((2, 1), ranked)}
        subsets |= {name: Subset((2, 0), loss) for name, loss in greedy.items()}
        return Result(
            "ladder", None, tokens=9, sequence=9, loss=1.0, alone=(2.0, 1.5, 1.1), subsets=subsets
        )

    assert result(1.5, 1.4, greedy=1.3).ladder_layers == "0,2,"
    assert result(1.5, 1.4, greedy=1.4).chosen == "ranked"
    assert result(1.5, 1.4).ladder_layers == "1,2,"
    assert result(1.2, 1.4, greedy=1.3).chosen == "last"  # the layers interact


def test_the_verb_measures_prints_plots_and_converts(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "out"
    words = ["--ladder-layers", "auto:2", "--calibration-tokens", "64", "--refit", "none"]
    assert main(["convert", source.path, str(out), "--calibration", str(text), *words]) == 0
    printed, stored = capsys.readouterr(), json.loads((out / "sensitivity.json").read_text())
    first, second, *_ = lines = printed.out.splitlines()
    assert first.startswith("the standard model's loss is ")
    assert second.startswith("of 64 tokens in sequences of 64; ")
    assert max(map(len, lines[:-2])) <= 80  # but for the paths at the end
    assert "measured 7/7 losses" in printed.err
    assert "(taken)" in printed.out
    assert [row["layer"] for row in stored["curve"]] == [0, 1, 2, 3]
    assert {path.name for path in out.iterdir()} == {"checkpoints", "sensitivity.json", "tokenizer"}
    # The stored model has the chosen layers, and the loss that was measured.
    saved = checkpoint.open_checkpoint(out)
    chosen = stored[stored["chosen"]]
    model = saved.config.model
    assert (model.residual, model.ladder_layers) == (
        "ladder",
        "".join(f"{layer}," for layer in chosen["layers"]),
    )
    rows = rows_of(
        [Text(str(text))], tokenizer=saved.tokenizer(), tokens=64, vocab_size=model.vocab_size
    )
    assert loss(pretrained.open(out), rows) == pytest.approx(chosen["loss"], rel=1e-5)
