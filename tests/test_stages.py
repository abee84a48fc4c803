"""Ordered stages of examples: records split by a score, and batches that come from one stage after another."""

import json

import numpy as np
import pytest

from ladder_jax import cli, config
from ladder_jax.data import batches, dataset, mixture
from ladder_jax.data import split as splitting
from ladder_jax.errors import UserError

TRAIN = ["train.steps=10", "train.batch=2", "train.sequence=24", "data.format=examples", "data.validation_fraction=0.2"]


@pytest.fixture
def records(tmp_path):
    """Thirty, in no order of their scores 0.0 to 0.29; the completion says the tenth."""
    order = np.random.default_rng(0).permutation(30)
    lines = [
        {"prompt": "draft", "completion": f" {i // 10}" * 8, "score": i / 100, "languages": "a-ü"}
        for i in order.tolist()
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def split(records, *more):
    return cli.main(["split", str(records), "--by", "score", "--out", str(records.parent / "out"), *more])


def scores(folder, name):
    return [json.loads(line)["score"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("more, sizes", [
    ([], dict(easy=(0, 10), medium=(10, 20), hard=(20, 30))),
    (["--at", "0.05,0.2"], dict(easy=(0, 5), medium=(5, 20), hard=(20, 30))),
    (["--stages", "a,b", "--descending"], dict(a=(15, 30), b=(0, 15))),
], ids=str)  # fmt: skip
def test_records_by_score(records, more, sizes, capsys):
    assert split(records, *more) == 0
    said = capsys.readouterr().out
    out = records.parent / "out"
    assert mixture.read_stages(out / "stages.yaml") == [out / f"{name}.jsonl" for name in sizes]
    for name, (first, end) in sizes.items():
        assert sorted(scores(out, name)) == [i / 100 for i in range(first, end)]
        assert f"{name} {end - first}" in said
    assert "a-ü" in (out / f"{name}.jsonl").read_text()  # as it was written


@pytest.mark.parametrize("more, said", [
    (["--by", "quality"], "records.jsonl:1: needs a number 'quality': this has 'prompt', 'completion', 'score',"),
    (["--at", "0.5"], "--at 0.5: 3 stages have 2 ascending scores between them"),
    (["--at", "0.2,0.1"], "--at 0.2,0.1: 3 stages have 2 ascending"),
    (["--at", "a,b"], "--at a,b: not numbers, such as 0.3,0.7"),
    (["--at", "0.1,0.9"], "none of 30 records is 'hard', with 'score' divided at 0.1, 0.9"),
    (["--stages", "easy"], "--stages easy: not two or more different names"),
    (["--stages", "easy,easy"], "--stages easy,easy: not two or more different names"),
    (["--stages", "../a,b"], "--stages ../a,b: not two or more different names"),
], ids=str)  # fmt: skip
def test_a_wrong_split_is_one_line_and_writes_nothing(records, more, said, capsys):
    assert split(records, *more) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (records.parent / "out").exists()


def test_a_folder_that_is_not_empty_is_refused(records, capsys):
    assert split(records) == 0 and split(records) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("score", ['"good"', "true", "NaN", "null"])
def test_a_score_is_a_number(tmp_path, score):
    (tmp_path / "one.jsonl").write_text(f'{{"score": 1}}\n{{"score": {score}}}\n')
    with pytest.raises(UserError, match="one.jsonl:2"):
        splitting.split(tmp_path / "one.jsonl", score="score", names=["a", "b"], descending=False)


def test_batches_come_from_one_stage_after_another(records):
    """Also where a later step is read first, as after a resume; what is held out is of all stages."""
    assert split(records, "--at", "0.1,0.2") == 0
    place = records.parent / "out" / "stages.yaml"
    settings = config.load("tiny", overrides=[*TRAIN, f"data.path={place}"])
    data = dataset.load(settings.data, train=settings.train, vocab_size=256)
    assert data.stages == (3, 7, 10)  # eight rows of each: thirds of ten steps
    rows = batches.Batches(data.training, 2)
    digits = lambda batch: {chr(token) for token in batch.tokens.ravel() if chr(token) in "012"}
    of_steps = {step: digits(rows[step]) for step in (9, 8, 7, 6, 5, 4, 3, 2, 1, 0)}
    assert all(of_steps[step] == {"0" if step < 3 else "1" if step < 7 else "2"} for step in of_steps)
    assert set().union(*(digits(data.held_out[index]) for index in range(data.held_out_rows))) == {"0", "1", "2"}
    other = config.load("tiny", overrides=[*TRAIN, f"data.path={place}", "train.steps=30"])
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
