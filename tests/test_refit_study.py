"""experiments/refit: its rows are what the library's refit gives, and its tables say what was measured."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.refit import __main__ as command
from experiments.refit import measured, plan, tables, tasks, texts, trained, ways
from experiments.refit.plan import Row, Way
from ladder_jax import nn, parallel, pretrained
from ladder_jax.errors import UserError
from ladder_jax.pretrained.refit import FittedProjections, Refit, refit
from tests.pretrained import gguf_files

SEQUENCE = 32


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Of four tiny layers; the last two, or all four, in place of the model's 15 and 30."""
    file = gguf_files.write(tmp_path_factory.mktemp("small") / "small.gguf", "llama-2", num_hidden_layers=4)
    draw = np.random.default_rng(0).integers
    held_out = {domain: draw(3, 129, (1, 41)).astype(np.int32) for domain in plan.DOMAINS}
    rest = {domain: draw(3, 129, (9, SEQUENCE)).astype(np.int32) for domain in plan.DOMAINS}
    return measured.Study(pretrained.open(file), texts.Texts(held_out, rest))


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(texts, "SEQUENCE", SEQUENCE)


@pytest.mark.parametrize(
    "way, projections", [(Way.INPUTS, FittedProjections.INPUTS), (Way.OUTPUTS, FittedProjections.BOTH)]
)
def test_rows_are_the_librarys_refit(study, way, projections):
    """And its losses those of the compiled model, in every domain."""
    row = Row(layers="2", way=way, tokens=128, scored=plan.DOMAINS)
    model = dataclasses.replace(study.source.model, residual=row.residual, ladder_layers=row.layers)
    rows = study.texts.calibration(row.text, tokens=row.tokens, seed=row.seed)
    settings = Refit(projections=projections)
    expected = refit(study.source, model=model, rows=rows, mesh=parallel.make_mesh(), settings=settings)
    result = study.measure(row)
    assert result["fits"] == [dataclasses.asdict(fit) for fit in expected.fits if "/" not in fit.sublayer]
    for domain, loss in result["losses"].items():
        assert loss == pytest.approx(loss_of(expected.source, model, study.texts.held_out[domain]), rel=1e-5)


def loss_of(source, model, tokens) -> float:
    definition = nn.define(model, mesh=parallel.make_mesh())
    params = pretrained.load(dataclasses.replace(source, model=model), mesh=definition.layout.mesh)
    scores = np.asarray(nn.compiled_logits(definition)(params, tokens[:, :-1]), np.float64)[0]
    scores -= scores.max(-1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(scores)), tokens[0, 1:]]))


def test_the_control_gains_nothing(study):
    plain = study.measure(Row(layers="0", way=Way.NONE))["losses"]
    for way in (Way.CONTROL, *plan.NEW):
        control = study.measure(Row(layers="0", way=way, tokens=64))
        assert control["losses"] == pytest.approx(plain, rel=1e-5) and len(control["fits"]) == 8


def test_ways_that_are_not_in_the_library(study):
    """A diagonal fit leaves more than a full one; the original's inputs are those of the first converted sublayer."""
    usual, scales, original = (
        study.measure(Row(layers="2", way=way, tokens=128)) for way in (Way.INPUTS, Way.SCALES, Way.ORIGINAL)
    )
    assert usual["fits"][0]["after"] < scales["fits"][0]["after"] < scales["fits"][0]["before"]
    assert original["fits"][0]["after"] == pytest.approx(usual["fits"][0]["after"], rel=1e-6)
    assert original["losses"] != usual["losses"]


def test_ways_that_change_other_arrays_or_the_program(study):
    """What is fitted to more leaves less; the arrays of a checkpoint are all that the others change."""
    row = Row(layers="2", tokens=128)
    usual, previous, rank = (
        study.measure(dataclasses.replace(row, way=way)) for way in (Way.INPUTS, Way.PREVIOUS, Way.LOW_RANK)
    )
    assert previous["fits"][0]["before"] == pytest.approx(usual["fits"][0]["before"], rel=1e-4)
    assert previous["fits"][0]["after"] < usual["fits"][0]["after"]
    assert rank["fits"][0]["after"] < rank["fits"][0]["before"]
    stream = study.measure(dataclasses.replace(row, way=Way.STREAM))
    assert stream["fits"][0] == usual["fits"][0] and stream["fits"][1] != usual["fits"][1]
    assert len({found["losses"]["wikitext"] for found in (usual, previous, rank, stream)}) == 4


@pytest.mark.parametrize("way", plan.STEPS)
def test_steps_after_the_refit(study, way):
    """They bring the predictions nearer to the original's, change what they may, and are scored as they are."""
    model = dataclasses.replace(study.source.model, residual="ladder", ladder_layers="2")
    rows = study.texts.calibration("wikitext", tokens=160, seed=0)
    before = refit(study.source, model=model, rows=rows, mesh=parallel.make_mesh()).source
    after = trained.trained(before, study.source, rows=rows, way=way)
    assert divergence(after, study, rows) < divergence(before, study, rows)
    once = trained.trained(before, study.source, rows=rows[:1], way=way)
    moved = {key: np.abs(once.arrays[key].read() - before.arrays[key].read()).max() for key in before.arrays}
    if way is Way.TRAINED:
        fitted = {key for key in moved if key.name in trained.FITTED and key.layer >= 2}
        assert len(fitted) == 10 and {key for key, most in moved.items() if most} == fitted
        moved = {key: moved[key] for key in fitted}
    assert np.array(list(moved.values())) == pytest.approx(trained.RATE, rel=0.01)  # the first step of Adam is a sign
    for domain, loss in study.measure(Row(layers="2", way=way, tokens=160))["losses"].items():
        assert loss == pytest.approx(loss_of(after, model, study.texts.held_out[domain]), rel=1e-5)


def divergence(source, study, rows) -> float:
    """Mean divergence of a model's predictions from the original's, in float64."""
    scores = []
    for one in (study.source, source):
        definition = nn.define(one.model, mesh=parallel.make_mesh())
        params = pretrained.load(one, mesh=definition.layout.mesh)
        logits = np.asarray(nn.compiled_logits(definition)(params, rows), np.float64)
        logits -= logits.max(-1, keepdims=True)
        scores.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
    return float(np.mean(np.sum(np.exp(scores[0]) * (scores[0] - scores[1]), axis=-1)))


def test_the_original_has_nothing_to_learn_from_itself(study):
    plain = study.measure(Row(layers="0", way=Way.NONE))["losses"]["wikitext"]
    control = Row(layers="0", way=Way.TRAINED, tokens=64)
    assert study.measure(control)["losses"]["wikitext"] == pytest.approx(plain, rel=1e-5)
    control = dataclasses.replace(control, way=Way.DISTILLED)  # a step of Adam moves by the rate whatever the gradient
    assert study.measure(control)["losses"]["wikitext"] > plain - 0.01


def test_weights_of_tokens(study):
    """Equal ones give the library's sums; a row's last input has no target, and so no gradient."""
    definition = nn.define(study.source.model, mesh=parallel.make_mesh())
    rows = study.texts.calibration("wikitext", tokens=160, seed=0)
    run = measured.Pass(definition, study.source, rows)
    run.advance(0, 0)
    expected, found = run.statistics(0, 1), ways.weighted(run, 0, 1, weights=np.ones(rows.shape))
    assert found.products == pytest.approx(expected.products, rel=1e-4, abs=1e-3)
    assert found.energy == pytest.approx(expected.energy, rel=1e-5)
    weights = study._gradients("wikitext", 160, 0)
    assert weights.shape == (4, 2, 5, SEQUENCE) and (weights[..., :-1] > 0).all() and (weights[..., -1] == 0).all()
    row = Row(layers="2", tokens=160, way=Way.FISHER)
    assert study.measure(row)["losses"] != study.measure(dataclasses.replace(row, way=Way.GRADIENT))["losses"]


def test_the_plan():
    rows = plan.rows()
    assert len({json.dumps(row.asked) for row in rows}) == len(rows)
    assert {len(layers.split(",")) for layers in plan.SENSITIVE.values()} == set(plan.SENSITIVE)
    assert {row.layers for row in rows} == {"0", "15", "30", *plan.SENSITIVE.values()}


def test_texts_are_cut_in_two(tmp_path):
    tokenizer = type("Tokenizer", (), {"encode": lambda self, text: [ord(letter) for letter in text]})()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name[0] * (texts.HELD_OUT + 1) + "xy" * 100)
    question = json.dumps({"question": "q" * 1500, "answer": "4" * 1500})
    (tmp_path / "c.jsonl").write_text(question)
    files = {"wikitext": str(tmp_path / "a.txt"), "shakespeare": str(tmp_path / "b.txt"), "python": None}
    loaded = texts.load({**files, "gsm8k": str(tmp_path / "c.jsonl")}, tokenizer=tokenizer)
    assert set(loaded.held_out["wikitext"].ravel()) == {ord("a")} and not (loaded.rest["wikitext"] == ord("a")).any()
    mixed = loaded.calibration(plan.MIXTURE, tokens=8 * SEQUENCE, seed=0)
    assert mixed.shape == (8, SEQUENCE) and (mixed == ord("4")).all(axis=1).sum() == 2
    with pytest.raises(UserError, match="wikitext has 6 rows to calibrate on; 7 are asked for"):
        loaded.calibration("wikitext", tokens=7 * SEQUENCE, seed=0)


def test_tables(tmp_path, capsys):
    plain, usual = Row(way=Way.NONE), Row()
    rows = [
        {**Row(layers="0", way=Way.NONE).asked, "losses": {"wikitext": 2.0, "gsm8k": 1.0}, "fits": []},
        {**plain.asked, "losses": {"wikitext": 4.0, "gsm8k": 3.0}, "fits": []},
        *(
            {**dataclasses.replace(usual, seed=seed).asked, "losses": {"wikitext": 2.4 + seed / 10}, "fits": FITS}
            for seed in (0, 1, 2)
        ),
    ]
    (tmp_path / "results.json").write_text(json.dumps({"rows": rows}))
    assert command.main(["--tables", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| last 15 | 4.000 | 2.400 | +2.000 | +0.400 | 80% |" in printed
    assert "| last 15 | inputs | wikitext | 12,288 | 0.001 | 3 | +0.500 ± 0.100 |" in printed
    assert "| last 15 | plain |  | 4.000 | 3.000 |" in printed
    assert (tmp_path / "refit.png").read_bytes().startswith(b"\x89PNG")
    assert command.main(["--out", str(tmp_path), "--wikitext", "x"]) == 2
    assert "refit: name the texts: --gsm8k FILE is missing" in capsys.readouterr().err


FITS = [{"layer": 15, "sublayer": name, "before": 0.5, "after": 0.1} for name in ("attention", "mlp")]


def test_scores_have_their_errors():
    """A difference on the same answers has a smaller error than the loss itself."""
    tokens = [10, 20, 30, 40]
    first = {"tokens": tokens, "loglikelihoods": [-10.0, -60.0, -60.0, -160.0]}
    other = {"tokens": tokens, "loglikelihoods": [-15.0, -70.0, -75.0, -180.0]}  # half a nat a token more
    value, error = tasks.loss(first)
    assert value == 2.9 and error == pytest.approx(
        np.std([10 - 29, 60 - 58, 60 - 87, 160 - 116], ddof=1) / 2 / 25, rel=1e-9
    )
    assert tasks.loss(other, less=first) == (0.5, 0.0)
    chosen = {"accuracy": 0.5, "accuracy_stderr": 0.07, "accuracy_normalised": 0.6, "accuracy_normalised_stderr": 0.06}
    models = [
        {"name": "a", "continuation": chosen, "worked": first},
        {"name": "b", "continuation": chosen, "worked": other},
    ]
    table = tables.on_tasks(models)
    assert f"| a | 50% ± 7% | 60% ± 6% | 2.900 ± {error:.3f} | - |" in table
    assert "| 3.400 ± " in table and "| +0.500 ± 0.000 |" in table


@pytest.mark.full
def test_a_model_is_scored_once(tmp_path, capsys):
    file = gguf_files.write(tmp_path / "small.gguf", "llama-2")
    words = "the cat sat on a mat and then it ran off to see the rat".split()
    lines = [" ".join(words[number % 7 :] + words[: number % 7] + words) for number in range(400)]
    (tmp_path / "wiki.txt").write_text("\n".join(lines))
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"question": "a?", "answer": "the cat"}) + "\n" for _ in "123")
    )
    asked = ["--wikitext", str(tmp_path / "wiki.txt"), "--gsm8k", str(tmp_path / "sums.jsonl"), "--out", str(tmp_path)]
    few = ["--continuations", "4", "--answers", "2"]
    assert tasks.main([*asked, *few, f"original={file}"]) == 0
    (row,) = json.loads((tmp_path / "tasks.json").read_text())["models"]
    assert len(row["worked"]["tokens"]) == 2 and row["continuation"]["examples"] == 4
    assert tasks.main([*asked, *few, "original=nowhere"]) == 0  # it is there
    assert tasks.main([*asked, "original"]) == 2
    assert "name each model, NAME=MODEL" in capsys.readouterr().err
