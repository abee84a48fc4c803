"""Two halves of a batch in turn: their timeline, their price, and where they are the opponent."""

import dataclasses
import itertools
import re
import types

import numpy as np
import pytest

from ladder_jax import config, residual, train
from ladder_jax.config import Launch, preset
from ladder_jax.predict import halves, machine
from ladder_jax.predict.program import Program
from ladder_jax.predict.timeline import Work, play_slots, turns
from tests import cases
from tests.changed import ROOT
from tests.predict.asked import answered, by_residual, of_layers, predict, prompt, run
from tests.refusals import refused

GUIDE = (ROOT / "docs/guides/halves.md").read_text()


def in_turn(name, *all_reduces, length=1.0, **settings):
    """Every half of a sublayer of two layers takes `length` busy seconds, and its all-reduce those
    of its half.
    """
    steps = itertools.chain.from_iterable(residual.topology(name, num_layers=2).layers)
    slots = turns(steps, work=lambda sublayers, half: Work(length), all_reduces=all_reduces)
    return play_slots(slots, **{"contention": 0.0, **settings})


@pytest.mark.parametrize("name", ["standard", "ladder", "ladder-2"])
@pytest.mark.parametrize(
    "all_reduce, length",
    {
        0.25: 1.0,
        1.0: 1.0,
        3.0: 1.0,
    }.items(),
)
def test_each_all_reduce_stands_beside_the_other_halfs_sublayer(name, length, all_reduce):
    """Of 8 turns the first hides nothing, each other one the all-reduce before it; the last
    all-reduce is bare.
    """
    found = in_turn(name, all_reduce, all_reduce, length=length)
    assert found.seconds == pytest.approx(length + 7 * max(length, all_reduce) + all_reduce)
    assert (found.all_reduces, found.compute) == (8, 8 * length)
    assert found.wire == pytest.approx(8 * all_reduce)


def test_a_window_takes_from_what_is_hidden():
    late = in_turn("standard", 0.75, 0.75, window=0.5)
    assert late.seconds == pytest.approx(1 + 7 * (0.5 + 0.75) + 0.75)


@pytest.mark.parametrize(
    "rows, tokens",
    {
        2: 1,
        3: 2,
        8: 4096,
        1: 4096,
    }.items(),
)
def test_halves_of_a_block_are_the_block(rows, tokens):
    _, whole = prompt(preset("tiny"), ranks=1, rows=rows, tokens=tokens)
    first, second = whole.halves
    assert first.size + second.size == whole.size
    assert min(first.size, second.size) > 0
    scores = lambda block: block.size * block.attended
    assert scores(first) + scores(second) == pytest.approx(scores(whole))
    if rows == 1:
        assert scores(second) == pytest.approx(3 * scores(first), rel=0.01)
        assert (first.cached, second.cached) == (tokens / 2, tokens)


def compute(*, interleave, **shape):
    one = preset("llama-3-70b", residual="standard", num_layers=4)
    return of_layers(one, program=Program(interleave=interleave), **shape).compute


def test_the_price_at_few_rows_is_near_what_compilers_estimate():
    """The guide's table: estimated cycles of two halves over those of the whole batch, compiled and
    predicted.
    """
    rows = re.findall(r"^\| (\d[\d,]*) \| (.+) \|$", GUIDE, re.M)
    assert len(rows) == 5
    for tokens, cells in rows:
        for name, shown in zip(("v5p", "v6e", "tpu7x"), cells.split(" | "), strict=True):
            compiled, predicted = map(float, shown.split(", "))
            shape = dict(on=machine.load(name), rows=2, tokens=int(tokens.replace(",", "")) // 2)
            found = compute(**shape, interleave=2) / compute(**shape, interleave=1)
            assert predicted == pytest.approx(found, abs=0.0051)
            assert predicted == pytest.approx(compiled, abs=0.12)


def opponent(hardware, *, batch, tensor=8):
    answer = predict(hardware=hardware, tensor=tensor, batch=batch, residual="standard")
    return answer.baseline.interleave["step"]


@pytest.mark.parametrize(
    "hardware, whole, halved",
    [
        ("h100-no-nvlink", (1, 16, 128), (160, 256)),
        ("a800-pcie", (1, 32), (48, 256)),
        ("h100-nvlink", (2, 64, 256), ()),
    ],
)
def test_halves_of_a_decode_step_are_an_opponent_at_large_batches(hardware, whole, halved):
    """As the page of alternatives says. Users report a crossover between 64 and 128 rows over
    PCIe.
    """
    assert {opponent(hardware, batch=batch) for batch in whole} == {1}
    assert all(opponent(hardware, batch=batch) == 2 for batch in halved)
    assert opponent(hardware, batch=256, tensor=1) == 1


def test_a_row_has_no_halves_in_decoding(capsys):
    words = "--model llama-3-70b --hardware a800-pcie --batch 64 --residual standard,ladder"
    answer = answered(capsys, words)
    assert {row["interleave"]["step"] for row in answer["rows"]} == {1}
    # of this library's Standard, which decodes whole batches
    assert answer["rows"][0]["speedup"] < 1
    assert "prefill and step in two halves)" in run(capsys, words)


LLAMA = "--model llama-3-70b --hardware v5p --tensor 8 --phase"
QWEN = "--model qwen1.5-moe-a2.7b --hardware h100-nvlink --tensor 4 --layers 4 --experts exchange --phase"
PHASES = [f"{LLAMA} prefill", f"{LLAMA} train"]
PHASES += [f"{QWEN} prefill --prompt-length 8192", f"{QWEN} train --sequence 8192"]


@pytest.mark.parametrize("words", PHASES)
def test_interleave_chooses_the_rows(words, capsys):
    def chosen(value):
        answer = answered(capsys, f"{words} --batch 2 --interleave {value}")
        assert answer["baseline"] == answer["opponents"][0]
        return {name: row["interleave"] for name, row in by_residual(answer).items()}

    assert set(chosen("1").values()) == {1}
    assert chosen("auto")["standard"] == 2
    halved = chosen("2")
    without = halved.keys() & {"no-communication", "desync-2", "farskip"}
    assert halved == dict.fromkeys(halved, 2) | dict.fromkeys(without, 1)


def test_the_guides_table_of_what_to_take_is_what_is_predicted(capsys):
    line = r"^\|[^|]+\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| `(--hardware [^`]+)` \|$"
    rows = re.findall(line, GUIDE, re.M)
    assert len(rows) == 6
    for *shown, words in rows:
        asked = f"--model llama-3-70b --tensor 8 {words} --residual standard,ladder"
        whole, halves = (
            by_residual(answered(capsys, f"{asked} --interleave {parts}")) for parts in "12"
        )
        pace = lambda row: f"{row['tokens_per_second']:,.0f}"
        assert [pace(whole["standard"]), pace(halves["standard"]), pace(whole["ladder"])] == shown
        assert pace(halves["ladder"]) == shown[1]


MOE = preset("qwen1.5-moe-a2.7b", residual="ladder", moe=dict(capacity=1.25))


def decided(kind, *, residual="standard", tensor=8, model=None, experts="reduce", **settings):
    asked = config.RunConfig(
        model=model or preset("llama-3-70b", residual=residual),
        mesh=config.MeshConfig(tensor=tensor, experts=experts),
        train=config.TrainConfig(interleave="auto", **settings),
    )
    said = []
    found = halves.of_training(asked, kind=kind, say=said.append)
    (line,) = said
    return found.train.interleave.parts, line.removeprefix("train.interleave=auto: ")


@pytest.mark.parametrize(
    "kind, settings, parts, said",
    [
        ("TPU v5p", {}, 2, "2, predicted to be 1.25 x as fast in halves on v5p"),
        ("NVIDIA B200", dict(batch=2), 1, "1, predicted to be 1.02 x"),  # less than 3 %
        ("NVIDIA H100 80GB HBM3", dict(batch=2), 2, "2, predicted to be 1.05 x"),
        ("TPU v5p", dict(residual="ladder"), 1, ""),  # nothing is left to hide
        ("TPU v5p", dict(sequence_parallel=True), 2, ""),
        ("TPU v5p", dict(model=MOE, batch=8, sequence_parallel=True), 1, ""),
        (
            "TPU v5p",
            dict(model=MOE, batch=8, sequence_parallel=True, experts="exchange"),
            2,
            "2, predicted to be 1.05 x",
        ),
        ("TPU v5p", dict(batch=1, sequence=16), 1, ""),  # too few tokens to read the weights twice
        ("cpu", {}, 1, "1, as nothing is predicted for cpu"),
        ("TPU v5p", dict(tensor=1), 1, "1, as one tensor rank communicates nothing"),
        (
            "TPU v5p",
            dict(residual="no-communication"),
            1,
            "1, as this model has no halves",
        ),
    ],
)
def test_auto_takes_halves_of_training(kind, settings, parts, said):
    found, line = decided(kind, **{"batch": 4, **settings})
    assert found == parts
    assert line.startswith(said)


def standard_on(kind, model):
    """A definition on 8 tensor ranks, devices of that kind."""
    definition = cases.define("standard", tensor=4)
    devices = np.array([types.SimpleNamespace(device_kind=kind)])
    mesh = types.SimpleNamespace(shape={"tensor": 8}, devices=devices)
    layout = dataclasses.replace(definition.layout, mesh=mesh)
    return dataclasses.replace(definition, config=preset(model, residual="standard"), layout=layout)


def test_auto_takes_halves_of_long_prompts():
    large = standard_on("TPU v5p", "llama-3-70b")
    auto = config.DecodeConfig(interleave="auto")
    said = []
    of = lambda tokens, model=large: halves.of_reading(
        auto, definition=model, tokens=tokens, say=said.append
    )
    assert of(4096).interleave is config.Interleave.HALVES
    assert said.pop().startswith("decode.interleave=auto: 2, predicted to be 1.")
    assert of(16).interleave is config.Interleave.WHOLE
    assert of(4096, cases.define("standard", tensor=4)).interleave is config.Interleave.WHOLE
    assert said.pop() == "decode.interleave=auto: 1, as nothing is predicted for cpu"


@pytest.mark.parametrize("launch, parts", [("auto", 2), ("chained", 1)])
def test_halves_of_prompts_are_those_of_the_launch(launch, parts, monkeypatch):
    """A chained one leaves a sum half of the other half's compute; auto is explicit, with any jax."""
    monkeypatch.setattr(halves, "resolve_launch", lambda launch, *, mesh: Launch.EXPLICIT)
    definition = standard_on("NVIDIA H100 PCIe", "llama-3.2-3b")
    auto = config.DecodeConfig(interleave="auto", launch=launch)
    found = halves.of_reading(auto, definition=definition, tokens=512, say=lambda line: None)
    assert found.interleave.parts == parts


def test_a_run_that_is_not_decided_writes_nothing(tmp_path):
    asked = config.RunConfig(
        model=preset("tiny"),
        train=config.TrainConfig(interleave="auto", steps=2, warmup_steps=1),
        run=config.FolderConfig(dir=str(tmp_path / "out")),
    )
    with refused("interleave=auto is decided by the commands train, generate and serve"):
        train.run(asked)
    assert not list(tmp_path.iterdir())
