"""Runs that go on from a checkpoint: what trains, what stays bit for bit, how they resume, what is
refused.
"""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from jax._src import xla_bridge
from numpy.testing import assert_array_equal

from ladder_jax import checkpoint, config, files, nn, parallel, train
from ladder_jax.checkpoint import manifest
from ladder_jax.config import DecodeConfig, Phase
from ladder_jax.data import tokenizer
from ladder_jax.errors import RunFailed
from ladder_jax.overlap import request as overlaps
from ladder_jax.pretrained.formats import define, open_model, open_source
from ladder_jax.pretrained.transformer import Transformer, load
from ladder_jax.retrain import sources
from ladder_jax.train import folder, metrics
from tests import cases, tokenizers
from tests.covering import full
from tests.lines import write
from tests.refusals import refused

RUN = """
    train.steps=8 train.batch=4 train.sequence=32 train.log_every=1 train.checkpoint_every=4 train.evaluate_every=4
    train.evaluation_batches=1 train.warmup_steps=2 mesh.tensor=2 run.tensorboard=false
""".split()
SHAPE = """
    model.num_layers=2 model.d_model=16 model.num_heads=4 model.num_kv_heads=2 model.d_ff=16 model.dtype=float32
    model.vocab_size=320
""".split()
LADDER = ["model.residual=ladder", "data.format=examples"]
EVERYTHING = [
    *LADDER,
    "train.freeze=1",
    "lora.rank=2",
    "distill.teacher=start",
    "distill.residual=standard",
    "distill.alpha=0.5",
    "distill.hidden_weight=0.1",
    "conversion.steps=6",
]
GREEDY = DecodeConfig(max_new_tokens=3, temperature=0.0)
FULL = pytest.mark.full
SETTINGS = {
    "everything": EVERYTHING,
    "frozen": [*LADDER, "train.freeze=1", "data.validation_fraction=0.2"],
    "side": [*LADDER, "model.side.reduction=2"],
    "lora": [*LADDER, "lora.rank=2"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a standard model ("base") and its tokenizer, examples, and an empty recipe."""
    place = tmp_path_factory.mktemp("retrain")
    (place / "recipe.yaml").write_text("run: {name: recipe}\n")
    turn = lambda role, text: {"role": role, "content": text}
    examples = []
    for i in range(20):
        chat = [turn("user", f"cat {i}?"), turn("assistant", "the mat")]
        chat += [turn("user", "rat?"), turn("assistant", "no")]
        examples += [{"messages": chat}, {"prompt": f"the {i} ", "completion": "cat sat"}]
    examples += [{"text": "and the rat sat on the mat " * 9}]
    write(place / "chats.jsonl", examples)
    shape = config.load("tiny", overrides=[*SHAPE, "model.residual=standard"]).model
    params = cases.parameters(nn.define(shape, mesh=parallel.make_mesh()))
    tokens = tokenizer.load(tokenizers.folder(place / "tokenizer"))
    Transformer(shape, params=params, tokenizer=tokens).save(place / "base")
    return place


def given(place, directory, *more):
    asked = [
        "train.start={place}/base",
        "data.path={place}/chats.jsonl",
        f"run.dir={directory}",
        *more,
    ]
    return [*RUN, *(one.format(place=place) for one in asked)]


def run(place, directory, *more):
    said = []
    train.run(
        config.load(place / "recipe.yaml", overrides=given(place, directory, *more)),
        say=said.append,
    )
    return said


def params_of(path):
    saved = checkpoint.open_checkpoint(path)
    mesh = parallel.make_mesh()
    return jax.tree.map(np.asarray, saved.params(define(saved.config.model, mesh=mesh)))


def losses(directory):
    keys = ("step", "loss", "divergence", "turned", "validation_loss", "gradient_norm")
    return [tuple(row.get(key) for key in keys) for row in metrics.read(directory)]


@pytest.fixture(scope="module")
def trained(place):
    """The folder of a run with those settings, and what it said."""
    return functools.cache(
        lambda which: (place / which, run(place, place / which, *SETTINGS[which]))
    )


def test_the_model_and_the_tokenizer_are_the_checkpoints(trained, place, monkeypatch):
    """The settings are read before several processes are joined, when no device may be used."""
    directory, said = trained("everything")
    words = given(place, directory, *EVERYTHING)
    with monkeypatch.context() as unjoined:
        unjoined.setattr(xla_bridge, "get_backend", None)
        config.load(str(place / "recipe.yaml"), overrides=words)
    assert any("41 examples" in line and "1 were cut" in line for line in said)
    written = json.loads((directory / "config.json").read_text())
    assert written["model"]["d_model"] == 16
    assert written["model"]["residual"] == "ladder"
    base, ours = (
        checkpoint.open_checkpoint(path).tokenizer() for path in (place / "base", directory)
    )
    assert ours.name == base.name != "bytes"
    assert checkpoint.open_checkpoint(directory).data["tokenizer"] == ours.name
    rows = metrics.read(directory)
    assert [row["turned"] for row in rows] == pytest.approx([min(step / 6, 1) for step in range(8)])


@pytest.mark.parametrize("which", ["everything", full("frozen")])
def test_what_is_frozen_stays_bit_for_bit(which, trained, place):
    directory, _ = trained(which)
    before = params_of(place / "base")
    after = params_of(directory)
    same = lambda a, b: (a == b).all()
    assert same(before["embedding"]["table"], after["embedding"]["table"])
    first, other = (
        jax.tree.map(lambda a, b, l=l: same(a[l], b[l]), before["layers"], after["layers"])
        for l in (0, 1)
    )
    assert jax.tree.all(first)
    assert not any(jax.tree.leaves([other["attention"], other["mlp"]]))
    # With low-rank factors the norms and the output table stay, too.
    assert same(before["head"]["table"], after["head"]["table"]) == (which == "everything")
    assert other["mlp_norm"]["scale"] == (which == "everything")


def test_only_the_side_network_trains(trained, place, tmp_path):
    """The checkpoint holds both, and generates and scores with both; other formats have no such
    network.
    """
    side, said = trained("side")
    assert "no MFU: its formula is of training all weights on the data alone" in said
    before = params_of(place / "base")
    after = params_of(side)
    ends = after.pop("side")
    blocks = after["layers"].pop("side")
    jax.tree.map(assert_array_equal, after, before)
    assert all(np.abs(a).max() > 0 for a in jax.tree.leaves((ends["up"], blocks["gate"])))
    model = open_model(side)
    prompt = [5, 6, 7, 8, 9]
    (new,) = model.generator(tensor=1).tokens([prompt], config=GREEDY).tolist()
    definition = model.define(tensor=1)
    scores = nn.compiled_logits(definition)(model.params(definition), np.array([prompt + new]))
    assert new == scores[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    with refused("has a side network .model.side., which no other format has"):
        open_source(side)
    with refused("a side network .model.side. is not counted here"):
        overlaps.make(target="cpu:8", model=str(side), phase=Phase.DECODE, residual="ladder")
    loaded = load(side, mesh=parallel.make_mesh())
    assert_array_equal(loaded(np.array([prompt + new])), scores)
    with refused("'the model in memory' has a side network .model.side."):
        loaded.save(tmp_path / "saved")


@FULL
def test_a_side_network_is_trained_further(trained, place, tmp_path):
    """From another run's; the settings of the model are that checkpoint's."""
    side, _ = trained("side")
    start = ["data.format=examples", "train.steps=1", f"train.start={side}"]
    run(place, tmp_path / "more", *start)
    before = params_of(side)
    after = params_of(tmp_path / "more")
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert moved["side"]["up"]
    assert moved["layers"]["side"]["tap"]
    assert not moved["layers"]["mlp"]["up"]
    for wrong, said in (
        (
            ["model.side.reduction=1"],
            "train.start=.*: the checkpoint has a side network, .*reduction=2",
        ),
        (
            ["model.side=null"],
            "train.start=.*: the checkpoint has a side network, .* where None can be",
        ),
        ([f"distill.teacher={side}"], "distill.teacher=.*: .* where None can be"),
    ):
        with refused(said):
            run(place, tmp_path / "wrong", *start, *wrong)


def at_step_4(directory, copy):
    """A copy of a run as it stood at its checkpoint of step 4."""
    shutil.copytree(directory, copy)
    shutil.rmtree(copy / "checkpoints/8")
    return copy


@pytest.mark.parametrize("which", ["everything", "side", full("frozen"), full("lora")])
def test_resumed_runs_go_on_exactly(which, trained, place, tmp_path):
    directory, _ = trained(which)
    copy = at_step_4(directory, tmp_path / "copy")
    said = run(place, copy, *SETTINGS[which])
    assert any("from step 4" in line for line in said)
    assert losses(copy) == losses(directory)
    jax.tree.map(assert_array_equal, params_of(copy), params_of(directory))


def test_a_run_whose_tokenizer_could_not_be_written_begins_again(place, tmp_path, monkeypatch):
    write = files.write

    def full(file, content, **how):
        if file.name == "tokenizer.json":
            raise RunFailed("the disk is full")
        write(file, content, **how)

    monkeypatch.setattr(files, "write", full)
    with pytest.raises(RunFailed, match="the disk is full"):
        run(place, tmp_path, *LADDER)
    settings = config.load(place / "recipe.yaml", overrides=given(place, tmp_path, *LADDER))
    folder.check(settings, tmp_path)
    found = sources.tokenizer(settings, folder=tmp_path)
    assert found.name == checkpoint.open_checkpoint(place / "base").tokenizer().name


def test_a_start_that_has_changed_is_refused(trained, place, tmp_path):
    """What low-rank factors stand beside is not in their run's checkpoints."""
    directory, _ = trained("everything")
    copy = at_step_4(directory, tmp_path / "copy")
    saved = copy / "checkpoints/4"
    position = saved / "data/metadata"
    position.write_text(position.read_text().replace('"digest": "', '"digest": "0'))
    manifest.write(saved)
    with refused("train.start: .* is not the checkpoint any more"):
        run(place, copy, *EVERYTHING)


@pytest.mark.parametrize("said, more", {
    r"train.start=.*: the checkpoint has model.d_ff=16, and this run model.d_ff=32": ["model.d_ff=32"],
    "has one norm": ["model.residual=parallel-shared-norm"],
    "train.start: there is no model at 'nowhere'": ["train.start=nowhere"],
    "distill.teacher: there is no model": ["distill.teacher=nowhere"],
    "model itself.* or of refitted weights distill.teacher=PATH": ["distill.teacher=start"],
}.items(), ids=str)  # fmt: skip
def test_what_does_not_fit_is_one_line(place, tmp_path, more, said):
    with refused(said):
        run(place, tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()
