"""experiments/refit: its rows are what the library's refit gives, and its tables say what was
measured.
"""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments import study
from experiments.refit import __main__ as command
from experiments.refit.__main__ import DOMAINS, HERE, MIXTURE, USUAL, Measurement
from ladder_jax import parallel, pretrained
from ladder_jax.pretrained.refit import FittedProjections, Refit, refit
from tests import covering
from tests.pretrained import gguf_files
from tests.pretrained.test_refit import loss
from tests.refusals import refused

SEQUENCE = 32


def row(layers="15", *, scored=DOMAINS[:1], **fitted):
    return {
        "layers": layers,
        "residual": "ladder",
        "way": "plain",
        "scored": list(scored),
        **fitted,
    }


def refitted(layers="15", *, scored=DOMAINS[:1], **changes):
    return row(layers, scored=scored, **{**USUAL, **changes})


@pytest.fixture(scope="module")
def measurement(tmp_path_factory):
    """Of four tiny layers; the last two in place of the model's 15."""
    folder = tmp_path_factory.mktemp("small")
    file = gguf_files.write(folder / "small.gguf", "llama-2", num_hidden_layers=4)
    draw = np.random.default_rng(0).integers
    held_out = {domain: draw(3, 129, 41).astype(np.int32) for domain in DOMAINS}
    rest = {domain: draw(3, 129, (9, SEQUENCE)).astype(np.int32) for domain in DOMAINS}
    return Measurement(pretrained.open(file), held_out, rest)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(command, "SEQUENCE", SEQUENCE)


@pytest.mark.parametrize(
    "way, projections",
    covering.marked(
        [("inputs", FittedProjections.INPUTS)],
        chosen=[("inputs and outputs", FittedProjections.BOTH)],
    ),
)
def test_rows_are_the_librarys_refit(measurement, way, projections):
    """And its losses those of the compiled model, in every domain; worse than the original's, where
    nothing is late.
    """
    asked = refitted("2", way=way, text=MIXTURE, tokens=128, scored=DOMAINS)
    rows = measurement.calibration(asked)
    assert rows.shape == (4, SEQUENCE)
    model = dataclasses.replace(measurement.source.model, residual="ladder", ladder_layers="2")
    settings = Refit(projections=projections)
    expected = refit(
        measurement.source, model=model, rows=rows, mesh=parallel.make_mesh(), settings=settings
    )
    result = measurement.of(asked)
    assert result["fits"] == [dataclasses.asdict(fit) for fit in expected.fits]
    original = measurement.of(row("0", scored=DOMAINS))["losses"]
    converted = dataclasses.replace(expected.source, model=model)
    for domain, found in result["losses"].items():
        tokens = measurement.held_out[domain][None]
        assert found == pytest.approx(loss(converted, tokens), rel=1e-5)
        assert found != original[domain]
        assert original[domain] == pytest.approx(loss(measurement.source, tokens), rel=1e-5)


def test_rows_are_drawn_by_their_seed(measurement):
    of = lambda **asked: measurement.calibration(refitted("2", tokens=128, **asked))
    assert np.array_equal(of(seed=1), of(seed=1))
    assert not np.array_equal(of(seed=1), of(seed=2))
    with refused("wikitext has 9 rows to calibrate on; 10 are asked for"):
        measurement.calibration(refitted("2", tokens=10 * SEQUENCE))


def test_the_readme_says_what_was_measured():
    asked, text = command.asked(), (HERE / "README.md").read_text()
    assert len({json.dumps(one) for one in asked}) == len(asked) == 50
    assert study.fill(text, command.tables(study.load(HERE / "results.json")["rows"])) == text


def test_tables(tmp_path, capsys):
    rows = [
        {**row("0", scored=DOMAINS), "losses": dict(zip(DOMAINS, (2.0, 1.0, 1.0, 1.0)))},
        {**row(scored=DOMAINS), "losses": dict(zip(DOMAINS, (4.0, 3.0, 3.0, 3.0)))},
        {**refitted(), "losses": {"wikitext": 2.4}},
        {**refitted(seed=1), "losses": {"wikitext": 2.5}},
    ]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    assert command.main(["--tables", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| last 15 | 4.000 | 2.400 | +2.000 | +0.400 | 80% |" in printed
    assert "2.500" not in printed
    assert command.main(["--out", str(tmp_path), "--wikitext", "x"]) == 2
    assert "refit: name the texts: --gsm8k FILE is missing" in capsys.readouterr().err
    assert command.main(["--tables", "--out", str(tmp_path / "none")]) == 2


def test_a_disk_that_fails_is_one_line(capsys):
    for file, said in (
        ("self/mem", "cannot read '/proc/self/mem'"),
        ("a/b", "write into '/proc/a'"),
    ):
        place = pathlib.Path("/proc", file)
        work = lambda place=place: study.resumed([{"a": 1}], dict, file=place, about={})
        assert study.ended(work, name="refit") == 1
        assert said in capsys.readouterr().err
