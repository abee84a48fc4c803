"""Every command of README and docs is run, on files of the same names, or has a reason why it is
not.
"""

import os
import shlex

import pytest

from ladder_jax import cli
from ladder_jax.cli.main import parse
from tests import tokenizers
from tests.covering import full
from tests.lines import write
from tests.pretrained import gguf_files, models
from tests.test_docs import PAGES, commands

NOT_RUN = {
    "overlap ": "needs the compilers for TPUs: `make audit`; for cpu:8, tests/test_overlap.py",
    "generate HuggingFaceTB/": "downloads: from a hub on this machine, tests/pretrained/test_names.py",
    "predict --model HuggingFaceTB/": "downloads: as the last",
    "serve ": "does not end by itself: tests/serve/test_process.py",
    "train tiny --cpu-devices 1 ": "two processes: tests/processes/test_training.py",
    "train experiments/retrain/refitted.yaml": "needs hours: of a tiny model, tests/test_teachers.py",
    "convert Qwen3-30B-A3B runs/half": "needs 61 GB of weights: smaller, tests/pretrained/test_convert_experts.py",
    "train experiments/retrain/experts.yaml": "needs a pod: smaller, tests/test_expert_training.py",
    "bench --model llama": "needs an accelerator: of tiny, tests/test_bench.py",
    "calibrate ": "takes minutes: tests/test_calibrate.py",
    "doctor": "tests/test_cli.py",
}
FULL = {
    "train tiny-moe --cpu-devices 4 mesh.tensor=4 model.residual": "tests/test_expert_training.py trains farskip",
    "train tiny-moe --cpu-devices 4 mesh.tensor=4 mesh.experts": "tests/test_exchange.py trains so",
    "generate runs/halves": "tests/test_cli.py has the option",
    "generate SmolLM2-135M.gguf": "tests/pretrained/test_names.py",
    "evaluate runs/smollm2-ladder": "as runs/book",
    "train tiny --cpu-devices 8 mesh.data=2 mesh.tensor=4 run.dir=runs/first": "as runs/book",
    "generate runs/first": "as runs/book",
    "convert SmolLM2-135M runs/smollm2-auto": "tests/pretrained/test_sensitivity.py",
}
"""Marked so, with what covers the like in `make test`."""
SMALL = (
    "model.num_layers=1 model.d_model=32 model.d_ff=32 "
    "train.steps=2 train.batch=4 train.sequence=32 data.path=book.txt"
)
# Of as many rows as the guide trains.
FEW = (
    "model.num_layers=1 model.d_model=32 "
    "train.steps=2 train.sequence=32 train.evaluation_batches=1 data.path=book.txt"
)
ADDED = {
    "train tiny --cpu-devices 8 ": SMALL,
    "train tiny-moe --cpu-devices 4 mesh.tensor=4 model.residual": f"{FEW} run.name=farskip",
    "train tiny-moe --cpu-devices 4 mesh.tensor=4 mesh.experts": f"{FEW} run.name=exchange",
    "generate runs/": "--max-new-tokens 4",
    "generate SmolLM2": "--max-new-tokens 4",
    "evaluate runs/book --text": "--window 64 --stride 32",
    "evaluate runs/smollm2-ladder": "--window 64",
    "evaluate runs/book --multiple": "--window 256",
    "evaluate runs/book --generation": "--max-new-tokens 4",
    "plan ": "--confirm 0",
    "convert SmolLM2-135M runs/smollm2-auto": "--calibration-tokens 64 --search ranked",
    "convert SmolLM2-135M runs/smollm2-ladder": "--calibration-tokens 64",
    "convert SmolLM2-135M-Instruct": "--calibration-tokens 64",
}
"""Words that make a command quicker."""


def beginning(words, known):
    return next((start for start in known if f"{words} ".startswith(start)), None)


COMMANDS = list(
    dict.fromkeys(" ".join(words.split()) for path in PAGES for words in commands(path))
)
# Runs and converted models come before what reads them.
RUN = sorted(
    (words for words in COMMANDS if not beginning(words, NOT_RUN)),
    key=lambda words: words[:5] != "train",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with every file that a command names."""
    folder = tmp_path_factory.mktemp("place")
    text = "".join(f"line {i} of a little book about {i % 7} things\n" for i in range(400))
    for name in ("book.txt", "held-out.txt", "text.txt"):
        (folder / name).write_text(text)
    for name, animal in (("arc.jsonl", "cat"), ("arc-train.jsonl", "rat")):
        told = [
            {"question": f"{animal} {i}", "choices": [" sat", " ran"], "answer": 0}
            for i in range(6)
        ]
        write(folder / name, told)
    scored = [{"prompt": f"{i} ", "completion": "sat", "score": i / 9} for i in range(9)]
    write(folder / "records.jsonl", scored)
    asked = {"question": "2 + 2 =", "answer": "It is 4.\n#### 4"}
    write(folder / "gsm8k.jsonl", [asked])
    for name in ("fast.yaml", "mine.yaml"):
        (folder / name).write_text("based_on: h100-nvlink\nlink: {latency: 5.5e-6}\n")
    for name, layers in (("SmolLM2-135M.gguf", 6), ("SmolLM2-135M-Instruct.Q4_1.gguf", 16)):
        gguf_files.write(folder / name, "llama-2", vocab_size=100, num_hidden_layers=layers)
    model = models.write(folder / "SmolLM2-135M", "llama-2", vocab_size=100, num_hidden_layers=16)
    gguf_files.small().save(str(model / "tokenizer.json"))
    (folder / "web").mkdir()
    (folder / "web/a.txt").write_text(text)
    for name in ("experiments/predict", "docs/pictures"):
        (folder / name).mkdir(parents=True)
    tokenizers.folder(folder / "FOLDER")
    return folder


def test_no_reason_has_outlived_its_command():
    assert all(
        any(f"{words} ".startswith(start) for words in COMMANDS)
        for start in (*NOT_RUN, *FULL, *ADDED)
    )


@pytest.mark.parametrize("words", [one for one in COMMANDS if beginning(one, NOT_RUN | FULL)])
def test_a_command_that_is_not_run_is_understood(words):
    parse(shlex.split(words))


@pytest.mark.parametrize(
    "words",
    [full(one) if beginning(one, FULL) else one for one in RUN],
)
def test_a_documented_command(words, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    added = ADDED.get(beginning(words, ADDED), "")
    assert cli.main(shlex.split(f"{words} {added}")) == 0, capsys.readouterr().err
