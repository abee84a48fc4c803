"""The conversion study on a tiny model: killed, resumed, told from its results alone; and what it refuses."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from experiments.convert_smollm2 import __main__ as study
from experiments.convert_smollm2 import figures, plan, questions, tables
from experiments.pretrain.tables import fill
from ladder_jax import evaluate
from ladder_jax.errors import UserError
from tests.pretrained import gguf_files

HERE = pathlib.Path(plan.__file__).parent
ROOT = HERE.parent.parent
WORDS = "the thin cat sat there then with that other thing".split()
ARMS = ["original", "last-1-ladder", "last-1-ladder-fresh", "original-tokens", "last-1-ladder-tokens"]
TINY = ["train.sequence=128", "train.steps=4", "train.evaluate_every=2", "train.evaluation_batches=2",
        "train.learning_rate=0.01", "train.warmup_steps=0", "train.log_every=2"]  # fmt: skip
PLACES = "\n".join(f"<!-- table: {name} -->\n\n<!-- end -->" for name in ("converted", "retrained", "choices"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Killed once the first arm is measured and the second one has begun, then started again."""
    folder, chance = tmp_path_factory.mktemp("study"), random.Random(0)
    shape = dict(num_hidden_layers=3, hidden_size=24, num_attention_heads=3)
    model = gguf_files.write(folder / "tiny.gguf", "llama-2", **shape)
    text = folder / "book.txt"
    text.write_text("".join(" ".join(chance.choices(WORDS, k=20)) + "\n" for _ in range(700)))
    asked = [f"data.path={text}", *TINY, "--source", str(model), "--arms", ",".join(ARMS),
             "--runs", str(folder / "runs"), "--out", str(folder)]  # fmt: skip
    (folder / "README.md").write_text(PLACES)
    command = [sys.executable, "-m", "experiments.convert_smollm2", *asked]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("[2/5]"):
                break
        process.send_signal(signal.SIGKILL)
    before = {file: file.stat().st_mtime_ns for file in folder.glob("runs/original/seed-0/measured.json")}
    assert len(before) == 1
    assert study.main(asked) == 0
    return folder, asked, before, json.loads((folder / "results.json").read_text())


def test_a_killed_study_goes_on(done):
    folder, _, before, results = done
    assert all(file.stat().st_mtime_ns == then for file, then in before.items())  # and was not measured again
    assert [run["arm"] for run in results["runs"]] == ARMS
    assert [run["converted"] for run in results["runs"]] == [0, 1, 1, 0, 1]
    assert results["held_out_tokens"] == 2 * 2 * 128 and results["num_layers"] == 3


def test_trained_and_converted_are_measured_alike(done):
    """What training measures on held-out text is what the evaluation of its checkpoint measures."""
    _, _, _, results = done
    for name in ("original-tokens", "last-1-ladder-tokens"):
        (run,) = figures.runs(results, name)
        assert [step for step, _ in run["held_out"]] == [2, 4]
        assert run["held_out"][-1][1] == pytest.approx(figures.loss(run), abs=1e-4)
        begun = figures.before(results, run)
        assert begun["arm"] == name.removesuffix("-tokens") and figures.loss(run) < figures.loss(begun) - 0.1
    losses = {run["arm"]: figures.loss(run) for run in results["runs"]}
    curve = results["sensitivity"]["curve"]
    assert len({round(loss, 5) for loss in losses.values()}) == len(ARMS)  # five different models
    assert len(curve) == 3 and results["sensitivity"]["last"]["layers"] == [1, 2]
    assert figures.less(figures.runs(results, "original-tokens"), lambda run: figures.control(results, run)) == "+0.000"


def test_tables_and_figures_come_from_the_results_alone(done, tmp_path):
    folder, *_ = done
    assert "| last 1, ladder-fresh | 33% |" in (folder / "README.md").read_text()
    for name in ("results.json", "README.md"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert study.main(["--tables", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == (folder / "README.md").read_text()
    for name in ("quality.png", "sensitivity.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["train.learning_rate=1"], "was measured with another train: choose another --runs folder"),
        (["data.format=examples"], "data.format=examples: the study measures running text"),
        (["train.evaluation_batches=1000"], "2000 are measured"),
        (["--arms", "last-1-laddr"], "did you mean 'last-1-ladder'"),
        (["--size", "fulll"], "did you mean 'full'"),
    ],
)
def test_the_study_refuses_what_cannot_be(done, more, said, capsys):
    _, asked, *_ = done
    assert study.main([*asked, *more]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert said in told[-1]


def test_missing_results_are_named(tmp_path):
    with pytest.raises(UserError, match="run the study first"):
        tables.write(tmp_path)


def test_the_continuation_task(tmp_path):
    """The right choice goes on where the prompt ends; wrong ones go on elsewhere; headings are no paragraphs."""
    text = "".join(f" = Title {i} = \n{' '.join(f'{chr(97 + i)}{n}' for n in range(9))}\n" for i in range(9))
    file = tmp_path / "questions.jsonl"
    questions.write(text, count=6, context=4, continuation=3, file=file)
    for i, found in enumerate(evaluate.read_choices(str(file))):
        letter = chr(97 + i)
        assert (found.prompt, found.answer) == (
            " ".join(f"{letter}{n}" for n in range(4)),
            f"{letter}4 {letter}5 {letter}6",
        )
        assert len(set(found.choices)) == 4 and sum(letter in choice for choice in found.choices) == 1
    with pytest.raises(UserError, match="has 9 paragraphs of 12 words or more|has 0 paragraphs"):
        questions.write(text, count=6, context=8, continuation=4, file=file)


def test_the_plan_compares_equal_numbers_of_layers():
    """Of SmolLM2's 30: a third, half, two thirds and all, the last and the least sensitive; the control is there."""
    found = {arm.name: arm for arm in plan.arms(plan.size("full"), num_layers=30)}
    order = list(range(29, -1, -2)) + list(range(0, 30, 2))
    for count in (10, 15, 20):
        assert found[f"last-{count}-ladder-tokens"].ladder_layers(order, num_layers=30) == str(count)
        chosen = found[f"sensitive-{count}-ladder-tokens"].ladder_layers(order, num_layers=30).split(",")
        assert sorted(map(int, chosen)) == sorted(order[:count])
    assert found["original-tokens"].choice is None and found["last-15-ladder-fresh-tokens"].ranks == 3
    small = [arm.name for arm in plan.arms(plan.size("small"), num_layers=30)]
    assert set(small) < set(found) and small.index("original-tokens") > small.index("last-30-ladder")


def test_the_readme_says_what_the_results_say():
    results, text = json.loads((HERE / "results.json").read_text()), (HERE / "README.md").read_text()
    assert fill(text, tables.sections(results)) == text
