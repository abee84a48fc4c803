"""Ordered stages of examples: batches that come from one stage after another."""

import json

import pytest

from ladder_jax import config
from ladder_jax.data import batches, dataset, mixture
from ladder_jax.errors import UserError

TRAIN = ["train.steps=10", "train.batch=2", "train.sequence=24", "data.format=examples", "data.validation_fraction=0.2"]


@pytest.fixture
def stages(tmp_path):
    """Three of ten examples each, whose completions say the stage's number."""
    for number in range(3):
        example = {"prompt": "draft", "completion": f" {number}" * 8}
        (tmp_path / f"{number}.jsonl").write_text(f"{json.dumps(example)}\n" * 10)
    (tmp_path / "stages.yaml").write_text("stages: [0.jsonl, 1.jsonl, 2.jsonl]\n")
    return tmp_path / "stages.yaml"


def test_batches_come_from_one_stage_after_another(stages):
    """Also where a later step is read first, as after a resume; what is held out is of all stages."""
    settings = config.load("tiny", overrides=[*TRAIN, f"data.path={stages}"])
    data = dataset.load(settings.data, train=settings.train, vocab_size=256)
    assert data.stages == (3, 7, 10)  # eight rows of each: thirds of ten steps
    rows = batches.Batches(data.training, 2)
    digits = lambda batch: {chr(token) for token in batch.tokens.ravel() if chr(token) in "012"}
    of_steps = {step: digits(rows[step]) for step in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}
    assert all(of_steps[step] == {"0" if step < 3 else "1" if step < 7 else "2"} for step in of_steps)
    assert set().union(*(digits(data.held_out[index]) for index in range(data.held_out_rows))) == {"0", "1", "2"}
    other = config.load("tiny", overrides=[*TRAIN, f"data.path={stages}", "train.steps=30"])
    again = dataset.load(other.data, train=other.train, vocab_size=256)
    assert again.fingerprint != data.fingerprint  # its batches are others


@pytest.mark.parametrize("text, said", [
    ("mixture: {a: 1}\n", "must hold one section 'stages:'"),
    ("stages: []\n", "must hold one section 'stages:'"),
    ("stages: [1]\n", "must hold one section 'stages:'"),
    ("stages: [", "is not YAML"),
    ("stages: [nowhere.jsonl]\n", "nowhere.jsonl' does not exist"),
], ids=str)  # fmt: skip
def test_a_wrong_list_of_stages(tmp_path, text, said):
    (tmp_path / "stages.yaml").write_text(text)
    settings = config.load("tiny", overrides=[*TRAIN, f"data.path={tmp_path / 'stages.yaml'}"])
    with pytest.raises(UserError, match=said):
        dataset.load(settings.data, train=settings.train, vocab_size=256)


def test_steps_of_stages():
    assert mixture.last_steps([10, 20, 70], steps=100, path="") == (10, 30, 100)
    assert mixture.last_steps([1, 1000, 1], steps=3, path="") == (1, 2, 3)
    with pytest.raises(UserError, match="has 3 stages, more than train.steps=2"):
        mixture.last_steps([1, 1, 1], steps=2, path="x")
