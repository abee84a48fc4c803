"""The paper's recipes as they resolve, and the small study: continued, and told from its
results alone.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from experiments import study as studies
from experiments.demo import __main__ as demo
from experiments.pretrain import __main__ as study
from ladder_jax import config, nn, parallel
from ladder_jax.checkpoint.arrays import named
from tests.refusals import refused

HERE = study.HERE

# Layers, d, heads, key/value heads, ffn, vocabulary and rope theta: arXiv 2501.06589 and its
# released configurations.
SHAPES = {
    "1b": (40, 1536, 24, 24, 4096, 49152, 10_000.0),
    "3b": (40, 2304, 36, 36, 9216, 49152, 10_000.0),
}


@pytest.mark.parametrize("size", SHAPES)
def test_the_recipes_are_the_papers(size):
    """The other topologies' differ from it in nothing else."""
    found = config.load(HERE / f"recipes/ladder-{size}.yaml")
    written = config.to_dict(found)
    names = "num_layers d_model num_heads num_kv_heads d_ff vocab_size rope_theta".split()
    model = dict(zip(names, SHAPES[size], strict=True), residual="ladder", tie_embeddings=False)
    model |= dict(ladder_layers=None, dtype="bfloat16", residual_dtype="bfloat16")
    train = dict(steps=25_000, sequence=2_048, learning_rate=3e-4, warmup_steps=2_000)
    train |= dict(final_learning_rate_fraction=0.1, beta1=0.9, beta2=0.95, eps=1e-10)
    train |= dict(weight_decay=0.1, clip_norm=1.0, z_loss=0.0)
    assert model.items() <= written["model"].items()
    assert train.items() <= written["train"].items()
    assert found.train.batch * found.train.sequence == 4_194_304
    # the paper trains without tensor parallelism
    assert (found.run.name, found.mesh.size, found.mesh.tensor) == (f"ladder-{size}", 64, 1)


def test_the_recipe_with_experts():
    found = config.load(HERE / "recipes/qwen3-30b-a3b.yaml")
    assert found.model == config.preset("qwen3-30b-a3b", residual="ladder")
    assert found.mesh.size == 64
    assert found.train.batch * found.train.sequence == 4_194_304


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("residual", ["standard", "parallel"])
def test_twins_differ_in_their_topology_alone(size, residual):
    ladder, twin = (
        config.load(HERE / f"recipes/{name}-{size}.yaml") for name in ("ladder", residual)
    )
    model = replace(ladder.model, residual=residual)
    assert twin == replace(ladder, model=model, run=replace(ladder.run, name=f"{residual}-{size}"))


def test_initial_values_are_the_papers():
    """N(0, 0.02), output projections N(0, 0.02 / sqrt(2 x 40 layers)); the schedule is
    test_training's.
    """
    small = (
        "model.d_model=16 model.num_heads=2 model.num_kv_heads=2 model.d_ff=32 model.vocab_size=512"
    )
    recipe = config.load(HERE / "recipes/ladder-1b.yaml", overrides=[*small.split(), "mesh.fsdp=1"])
    found = named(nn.initialize(nn.define(recipe.model, mesh=parallel.make_mesh()), seed=0))
    alike = "layers/attention/query", "layers/mlp/up", "embedding/table", "head/table"
    deviations = dict.fromkeys(alike, 0.02)
    deviations |= dict.fromkeys(
        ("layers/attention/out", "layers/mlp/down"), 0.02 / math.sqrt(2 * 40)
    )
    for name, deviation in deviations.items():
        values = np.asarray(found[name])
        # The deviation of n normal values is off by a share of about 1 / sqrt(2 n).
        assert abs(values.std() / deviation - 1) < 5 / math.sqrt(2 * values.size), name


def test_a_loss_between_two_measurements():
    run = {"held_out": [[10, 3.0], [20, 2.0], [30, 1.5]]}
    assert study.loss_at(run, 20) == 2.0
    assert study.loss_at(run, 25) == 1.75
    for step in (5, 31):  # what was not measured is not made up
        with pytest.raises(ValueError, match="not within"):
            study.loss_at(run, step)


def test_rows_are_kept_one_by_one(tmp_path):
    """A second call measures those that are not there, and only those."""
    file = tmp_path / "results.json"
    measured = []

    def measure(row):
        if row["seed"] == 2 and len(measured) < 3:
            raise KeyboardInterrupt
        measured.append(row["seed"])
        return {"loss": 0.5 * row["seed"]}

    def rows(*seeds):
        return studies.resumed(
            [{"seed": seed} for seed in seeds], measure, file=file, about={"text": "a"}
        )

    with pytest.raises(KeyboardInterrupt):
        rows(1, 2)
    assert measured == [1]
    assert json.loads(file.read_text()) == {"text": "a", "rows": [{"seed": 1, "loss": 0.5}]}
    assert [row["loss"] for row in rows(1, 3, 5, 2)] == [0.5, 1.5, 2.5, 1.0]
    assert measured == [1, 3, 5, 2]
    assert json.loads(file.read_text())["rows"] == rows(3)


SMALL = (
    "model.num_layers=1 model.d_model=16 model.d_ff=16 train.steps=8 train.batch=4 train.sequence=16"
    " train.warmup_steps=2 train.evaluate_every=4 train.evaluation_batches=1 train.checkpoint_every=4"
    " train.log_every=4 train.loop=scan"
).split()


def test_a_study_goes_on(book, tmp_path, capsys):
    """And its tables come from the results alone; changed settings are refused, as are missing
    results.
    """
    folder = tmp_path / "study"
    folder.mkdir()
    words = [f"data.path={book}", *SMALL, "--seeds", "1"]
    words += ["--runs", str(folder / "runs"), "--out", str(folder)]
    readme = folder / "README.md"
    readme.write_text("<!-- table: equal -->\n\n<!-- end -->")
    assert study.main([*words, "--topologies", "standard"]) == 0
    (first,) = folder.glob("runs/*/seed-0/result.json")
    before = first.stat().st_mtime_ns
    words += ["--topologies", "ladder-fresh"]
    assert study.main(words) == 0
    assert first.stat().st_mtime_ns == before  # and was not made again
    results = json.loads((folder / "results.json").read_text())
    assert [run["residual"] for run in results["runs"]] == ["standard", "ladder-fresh"]
    for run in results["runs"]:
        # As many steps as fit into Standard's predicted time, up to the next measurement.
        faster = study.speedup(results, run["residual"])
        assert run["steps"] % 4 == 0
        assert run["steps"] - 4 < max(8, 8 * faster) <= run["steps"]
        assert [step for step, _ in run["held_out"]] == list(range(4, run["steps"] + 1, 4))
        assert all(4 < loss < 6 for _, loss in run["held_out"])
    row = "| ladder-fresh | 1 |"
    assert row in capsys.readouterr().out
    told = readme.read_text()
    assert row in told

    readme.write_text("<!-- table: equal -->\n\n<!-- end -->")
    assert study.main(["--tables", "--out", str(folder)]) == 0
    assert readme.read_text() == told
    capsys.readouterr()

    assert study.main([*words, "train.learning_rate=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "learning_rate was 0.003, now 1.0" in line
    assert study.main(["--tables", "--out", str(tmp_path / "none")]) == 2
    assert "run the study first" in capsys.readouterr().err


@pytest.mark.parametrize("left, said", [('{"rows": [', "is not JSON"), ("[]", "not a list")])
def test_damaged_results(tmp_path, capsys, left, said):
    (tmp_path / "results.json").write_text(left)
    assert study.main(["--tables", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    "said, asked",
    {
        "--seeds must be positive": dict(seeds=0),
        "did you mean 'ladder-2'": dict(topologies=["ladder", "laddr-2"]),
        "did you mean 'train.steps'": dict(overrides=["train.step=3"]),
    }.items(),
)
def test_the_study_refuses_what_cannot_be(tmp_path, asked, said):
    with refused(said):
        study.runs(**{"folder": tmp_path, "overrides": [], "seeds": 1, **asked})


def test_the_readme_says_what_the_results_say():
    results = studies.load(HERE / "results.json")
    text = (HERE / "README.md").read_text()
    assert studies.fill(text, study.tables(results)) == text
    assert sorted([(run["residual"], run["seed"]) for run in results["runs"]]) == sorted(
        (residual, seed) for residual in study.TOPOLOGIES for seed in range(3)
    )


def test_the_demos_help(capsys):
    """Which was taken for an override."""
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    assert "--experts" in capsys.readouterr().out


def test_the_demo_of_tokens_that_are_no_bytes(tmp_path):
    assert demo.said(2.0, None) == "held-out loss 2.000 nats a token"
    demo.plot({"ladder": [dict(step=1, loss=2.0)]}, file=tmp_path / "loss.png", entropy=None)
    assert (tmp_path / "loss.png").is_file()
