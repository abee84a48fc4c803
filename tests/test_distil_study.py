"""experiments/distil: its texts share no block, its rows have their controls, and its tables say what was measured."""

import dataclasses
import json

import pytest

from experiments.distil import __main__ as command
from experiments.distil import figures, plan, smollm2, tables, texts
from experiments.distil.plan import Layers, Recipe, Row, Start
from experiments.refit import texts as refit_texts
from ladder_jax import config, evaluate
from ladder_jax.errors import UserError
from ladder_jax.pretrained.convert import command as convert
from tests.pretrained import gguf_files

TINY = ["model.num_layers=2", "model.d_model=16", "model.num_heads=2", "model.num_kv_heads=2", "model.d_ff=16",
        "train.steps=20", "train.batch=4", "train.sequence=32", "train.evaluation_batches=2", "train.log_every=10",
        "train.checkpoint_every=10", "train.evaluate_every=0", "train.warmup_steps=2"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With a text, and a small standard library; blocks of a few lines."""
    monkeypatch.setattr(texts, "BLOCK", 64)
    lines = lambda word: "".join(f"{word} {number} and so on\n" for number in range(400))
    (tmp_path / "book.txt").write_text(lines("line"))
    record = json.dumps({"question": "how many?", "answer": "#### 4"})
    (tmp_path / "sums.jsonl").write_text(f"{record}\n" * 100)
    for name in ("lib", "lib/site-packages"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(lines("installed" if "site" in name else "pass  #"))
    (tmp_path / "lib" / "latin.py").write_bytes(b"# caf\xe9\n" * 100)
    return tmp_path


def asked(folder, *more: str) -> list[str]:
    named = ["--text", str(folder / "book.txt"), "--text", str(folder / "sums.jsonl"), "--python", str(folder / "lib")]
    return [*named, "--runs", str(folder / "runs"), "--out", str(folder), *TINY, *more]


def corpus(folder, /, **changes) -> texts.Corpus:
    base = config.load(str(plan.__file__).replace("plan.py", "small.yaml"), overrides=TINY)
    named = dict(texts=[str(folder / "book.txt")], python=str(folder / "lib"))
    return texts.prepare(base, **(named | dict(share=0.1, folder=folder / "runs") | changes))


def test_texts_share_no_block(folder):
    found = corpus(folder)
    parts = {}
    for file, size in ((found.pretrain, 20 * 4 * 32), (found.retrain, 2 * 4 * 32)):
        content = file.read_bytes()
        held_out = int(len(content) * found.held_out[file.name])
        parts[file.name], parts["held out"] = content[:-held_out], content[-held_out:]
        assert len(content) - held_out >= size + 1 and held_out >= 2 * 4 * 32 + 1
        assert content.endswith(b"\n") and b"installed" not in content
    lines = [set(part.decode().splitlines()) for part in parts.values()]
    assert len(lines) == 3 and not any(lines[a] & lines[b] for a, b in ((0, 1), (0, 2), (1, 2)))
    assert any(line.startswith("line") for line in lines[0]) and any(line.startswith("pass") for line in lines[0])
    assert corpus(folder) == found  # kept
    with pytest.raises(UserError, match="was made from other texts or of another size"):
        corpus(folder, share=0.2)
    with pytest.raises(UserError, match="bytes; .* are needed"):
        corpus(folder, share=40, folder=folder / "more")


def test_every_retrained_row_has_its_control_before_it():
    rows = plan.rows()
    place = {figures.seedless(row) + (row.seed,): number for number, row in enumerate(rows)}
    assert len(place) == len(rows)
    for row in rows:
        control = figures.control(row)
        assert place[figures.seedless(control) + (row.seed,)] <= place[figures.seedless(row) + (row.seed,)]
    usual = [row for row in rows if row.recipe is not Recipe.NONE and row.rate == plan.RATE]
    kinds = 3 * len(Start) + 1  # choices of layers from both starts, and the controls
    assert len(usual) == kinds * 3 * len(plan.SHARES) * len(plan.SEEDS)
    assert {row.seed for row in rows[:20]} == {0}


def results() -> dict:
    rows = []
    for seed in (0, 1):
        losses = {Row(seed): 2.0, Row(seed, Layers.LAST): 3.0, Row(seed, Layers.LAST, Start.REFITTED): 2.25 + seed / 10}
        for recipe, control in ((Recipe.TEXT, 1.9), (Recipe.TEACHER, 2.0)):
            losses[Row(seed, Layers.NONE, Start.PLAIN, recipe, 5.0)] = control
            losses[Row(seed, Layers.LAST, Start.REFITTED, recipe, 5.0)] = control + 0.1 + seed / 10
        rows += [{**row.asked, "loss": loss} for row, loss in losses.items()]
    rows.append({**Row(0, Layers.LAST, Start.REFITTED, Recipe.TEXT, 5.0, 1.0).asked, "loss": 2.5})
    return {"rows": rows}


def test_losses_are_compared_with_those_of_the_same_seed():
    losses = figures.measured(results())
    row = Row(0, Layers.LAST, Start.REFITTED, Recipe.TEXT, 5.0)
    assert figures.over(losses, row).values == pytest.approx((0.1, 0.2))
    assert figures.over(losses, row, other=figures.original).values == pytest.approx((0.0, 0.1))
    assert figures.over(losses, Row(0, Layers.ALL)) is None
    taught = dataclasses.replace(row, recipe=Recipe.TEACHER)
    losses[dataclasses.replace(taught, seed=1)] += 0.05
    assert figures.between(losses, row, taught).values == pytest.approx((0.0, -0.05))
    assert figures.between(losses, row, dataclasses.replace(row, start=Start.PLAIN)) is None


def test_tables_and_figures_come_from_the_results_alone(tmp_path, capsys):
    (tmp_path / "small.json").write_text(json.dumps(results()))
    places = [f"<!-- table: small-{name} -->\n\n<!-- end -->" for name in tables.sections(results())]
    (tmp_path / "README.md").write_text("\n".join(places))
    assert command.main(["--tables", "--out", str(tmp_path)]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "README.md").read_text()):
        assert "| last half | refitted | 2 | 2.300 ± 0.071 | +0.300 ± 0.071 | 70% |" in text
        assert "| last half | refitted | text | 2 | +0.300 ± 0.071 | +0.150 ± 0.071 |" in text
        assert "| original |  | text | 2 | +0.000 ± 0.000 | -0.100 ± 0.000 |" in text
        assert "| last half | text less predictions | refitted start | +0.000 ± 0.000 |" in text
        assert "| last half | refitted | text | 5 % | +0.000 | +0.500 |" in text
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")


def test_means_of_fewer_seeds_say_so(tmp_path):
    found = results()
    found["rows"] = [row for row in found["rows"] if row["seed"] == 0 or "share" not in row]
    assert "| last half | refitted | text | 1-2 | +0.300 ± 0.071 | +0.100 (of 1) |" in tables.sections(found)["control"]


def test_mistakes_are_named(folder, capsys):
    assert command.main(["--size", "smal"]) == 2
    assert "unknown size 'smal'; did you mean 'small'" in capsys.readouterr().err
    assert command.main(["--runs", str(folder)]) == 2
    assert "name a text: --text FILE is missing" in capsys.readouterr().err
    assert command.main(["--tables", "--out", str(folder)]) == 2
    assert "run the study first" in capsys.readouterr().err


@pytest.mark.full
def test_a_stopped_study_goes_on(folder, capsys, monkeypatch):
    """Stopped within the retraining of its fourth row; what was measured before is kept, and the tables are made."""
    last = lambda *more: Row(0, Layers.LAST, *more)
    rows = [Row(), last(), last(Start.REFITTED), Row(0, Layers.NONE, Start.PLAIN, Recipe.TEACHER, 10.0)]
    rows += [last(Start.REFITTED, Recipe.BOTH, 10.0), Row(0, Layers.CHOSEN, Start.REFITTED)]
    monkeypatch.setattr(plan, "rows", lambda: rows)
    monkeypatch.setattr(plan, "CALIBRATION", 128)
    monkeypatch.setattr(plan, "MEASURED", 64)

    def stop(line: str) -> None:
        if line.startswith("step ") and (folder / "runs/seed-0/last-refitted").exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr("experiments.distil.measured._say", stop)
        assert command.main(asked(folder)) == 130
    kept = {file: file.stat().st_mtime_ns for file in folder.glob("runs/seed-0/*/measured.json")}
    assert len(kept) == 3
    assert command.main(asked(folder)) == 0
    assert all(file.stat().st_mtime_ns == then for file, then in kept.items())
    found = json.loads((folder / "small.json").read_text())
    losses = figures.measured(found)
    assert list(losses) == rows and found["parameters"] > 0 and found["pretrained"][0]["held_out"][-1][0] == 20
    assert losses[rows[3]] == pytest.approx(losses[rows[0]], rel=1e-6)  # nothing to learn from itself
    assert len({losses[row] for row in (rows[0], rows[1], rows[2], rows[4])}) == 4
    converted = [row["ladder_layers"] for row in found["rows"]]
    assert converted.count("1") == 3 + (converted[5] == "1")  # the less sensitive half may be the last
    assert not list(folder.glob("runs/seed-0/*-10-*/run/checkpoints"))  # scored, and gone
    assert "last half" in capsys.readouterr().out


def of_the_real_model() -> list[dict]:
    """Rows of smollm2.json: each start's losses are its own, in all domains alike."""
    made = {smollm2.Row("original"): 2.5, smollm2.Row("plain"): 4.0, smollm2.Row("refitted"): 3.0}
    long = dict(tokens=smollm2.TOKENS, rate=smollm2.RATE)
    made |= {smollm2.Row("original", Recipe.TEXT, **long): 2.4, smollm2.Row("refitted", Recipe.TEXT, **long): 2.7}
    made |= {smollm2.Row("refitted", Recipe.TEACHER, **long, seed=seed): 2.8 + seed / 10 for seed in (0, 1)}
    domains = ("wikitext", "gsm8k", "shakespeare", "python")
    return [{**row.asked, "losses": dict.fromkeys(domains, loss)} for row, loss in made.items()]


def test_every_row_of_the_real_model_has_its_control():
    rows = smollm2.rows()
    assert len({row.name for row in rows}) == len(set(rows)) == len(rows)
    assert {row.control for row in rows} <= set(rows)
    assert rows[:3] == [smollm2.Row(start) for start in smollm2.STARTS]
    assert all(row.tokens % (512 * 8) == 0 for row in rows)  # whole steps


def test_the_real_models_table(tmp_path, capsys):
    (tmp_path / "smollm2.json").write_text(json.dumps({"rows": of_the_real_model()}))
    (tmp_path / "README.md").write_text("<!-- table: smollm2 -->\n\n<!-- end -->\n")
    assert smollm2.main(["--tables", "--out", str(tmp_path)]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "README.md").read_text()):
        assert "| refitted | not retrained | 0 | 0 | 1 | 3.000 | +0.500 | +0.500 | +0.500 | +0.500 | +0.500 |" in text
        assert "| refitted | text | 8,192 | 0.0001 | 1 | 2.700 | +0.200 | +0.200 | +0.200 | +0.200 | +0.300 |" in text
        # The original is the control of what its own predictions teach.
        twice = " | ".join(["+0.350 ± 0.071"] * 5)
        assert f"| refitted | original's predictions | 8,192 | 0.0001 | 2 | 2.850 ± 0.071 | {twice} |" in text
    assert smollm2.main(["--tables", "--out", str(tmp_path / "none")]) == 2
    assert smollm2.main(["original=a", "plain=b"]) == 2
    assert "name the three models" in capsys.readouterr().err
    assert smollm2.main(["original=a", "plain=b", "refitted=c", "--wikitext", "text.txt"]) == 2
    assert "--gsm8k FILE is missing" in capsys.readouterr().err


@pytest.mark.full
def test_a_real_model_goes_on_where_it_stood(folder, monkeypatch):
    """A tiny model in its place: what the first call measured is kept, and the second one goes on."""
    monkeypatch.setattr(refit_texts, "HELD_OUT", 64)
    monkeypatch.setattr(refit_texts, "SEQUENCE", 64)
    monkeypatch.setattr(smollm2, "SKIPPED", (0, 0))
    text, record = folder / "book.txt", json.dumps({"question": "how many?", "answer": "#### 4"})
    text.write_text("".join(f"line {number} and so on\n" for number in range(4000)))
    (folder / "sums.jsonl").write_text(f"{record}\n" * 2500)
    source, models = gguf_files.write(folder / "tiny.gguf", "llama-2", num_hidden_layers=4), {}
    for name in smollm2.STARTS:
        asked = dict.fromkeys("ladder_layers residual ranks calibration calibration_tokens refit ridge search".split())
        asked |= {"source": str(source), "destination": str(folder / name), "dtype": "float32", "to": "checkpoint"}
        asked |= {} if name == "original" else {"ladder_layers": "2"}
        asked |= {"calibration": [str(text)], "calibration_tokens": 512} if name == "refitted" else {}
        convert.run({**asked, "tensor": None, "json": False})
        models[name] = str(folder / name)
    long = dict(tokens=2 * 512, rate=1e-3)
    rows = [*map(smollm2.Row, smollm2.STARTS), *(smollm2.Row("refitted", recipe, **long) for recipe in
            (Recipe.TEACHER, Recipe.TEXT, Recipe.BOTH))]  # fmt: skip
    monkeypatch.setattr(smollm2, "rows", lambda: rows)
    named = [f"{name}={model}" for name, model in models.items()]
    named += ["--wikitext", str(text), "--shakespeare", str(text), "--out", str(folder)]
    named += ["--gsm8k", str(folder / "sums.jsonl"), "--runs", str(folder / "real")]
    assert smollm2.main([*named, "--rows", "4"]) == 0
    before = json.loads((folder / "smollm2.json").read_text())["rows"]
    assert smollm2.main(named) == 0
    found = json.loads((folder / "smollm2.json").read_text())["rows"]
    assert [row["recipe"] for row in found] == [row.recipe.value for row in rows] and found[:4] == before
    assert len({row["losses"]["wikitext"] for row in found}) == len(rows)
    retrained = evaluate.open_model(folder / "real" / rows[3].name / "model")
    assert retrained.definition.config == evaluate.open_model(models["refitted"]).definition.config
    assert not (folder / "real" / rows[3].name / "run" / "checkpoints").exists()
