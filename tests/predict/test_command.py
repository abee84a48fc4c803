"""`ladder-jax predict` as a user meets it: the answer, the advice, and mistakes."""

import re

import pytest

from ladder_jax.config import EXPERT_RESIDUALS, RESIDUALS
from ladder_jax.predict import result
from tests.predict.asked import answered, by_residual, predict, run


@pytest.mark.parametrize(
    "asked, residual, helps, reason",
    [
        (dict(), "ladder", True, ": ladder gives 1."),
        (
            dict(hardware="h100-no-nvlink"),
            "parallel-ladder",
            True,
            ", the plain Ladder 1.",
        ),
        (dict(tensor=1, model="llama-3-8b"), "standard", False, "no: one device"),
        (dict(hardware="h100-no-nvlink", residual="standard,desync-2"), "desync-2", None, ""),
    ],
)
def test_advice(asked, residual, helps, reason):
    found = predict(**asked).advice
    assert (found.residual, found.ladder_helps) == (residual, helps)
    assert reason in found.reason


def test_every_topology_has_its_preference():
    assert set(result.PREFERENCE) - {"ladder-K"} < {*RESIDUALS, *EXPERT_RESIDUALS}


def test_json(capsys):
    found = answered(capsys, "--model llama-3-70b --hardware v5p --tensor 8")
    asked = ("model", "hardware", "tensor", "batch", "prompt_length", "new_tokens")
    assert [found[name] for name in asked] == ["llama-3-70b", "v5p", 8, 1, 1024, 512]
    rows = by_residual(found)
    assert tuple(rows) == RESIDUALS
    for row in rows.values():
        total = row["prefill_seconds"] + row["decode_seconds"]
        assert row["tokens_per_second"] == pytest.approx(512 / total)
        assert row["decode_seconds"] == pytest.approx(511 * row["step_seconds"])
        assert 0 <= row["exposed_seconds"] < total
        assert row["fits"]
    assert found["recommendation"]["residual"] == "ladder"
    assert found["constants"]["link.step"]["source"].startswith("https://jax-ml.github.io")


def test_text_and_plot(capsys, tmp_path):
    picture = tmp_path / "a.png"
    words = "--model llama-3.1-405b --hardware h100-nvlink --tensor 8 --batch 4"
    words += " --residual standard,ladder-7,no-communication"
    out = run(capsys, f"{words} --plot {picture}")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert out.startswith("take ladder-7\nreason    communication is ")
    assert re.search("^note.*more than a device's 79 GiB", out, re.M)


MISTAKES = {
    "--model llama-3-70b": {
        "--hardware h200-nvlnk": "unknown hardware (not a .yaml file either) 'h200-nvlnk'; did you mean 'h200-nvlink'?",
        "": "the following arguments are required: --hardware",
        "--hardware nowhere.yaml": "cannot read hardware 'nowhere.yaml': No such file",
        "--hardware v5e --tensor 5": (
            "--tensor 5 does not split this model over v5e, of 16 devices (allowed: 1, 2, 4, 8, 16)"
        ),
        "--hardware h100-nvlink --tensor 16": "--tensor 16 does not split this model over h100-nvlink, of 8 devices",
        "--model llama-3-7b --hardware v5e": "did you mean 'llama-3-70b'",
        "--hardware v5e --batch 0": "--batch must be positive, not 0",
        "--hardware v5e --new-tokens 1": "--new-tokens must be at least 2",
        "--hardware v5e --residual laddr": "unknown residual 'laddr'; did you mean 'ladder'?",
        "--hardware v5e --ladder-layers 99": "is no choice of layers",
        "--hardware v5e --residual standard --ladder-layers 2": "--ladder-layers needs a ladder kind",
        "--hardware v5e --plot a.txt": "--plot a.txt: the file must end in",
    },
    "--model llama-3-70b --hardware h100-nvlink": {
        "--interleave 3": "unknown --interleave '3' (allowed: 1, 2, auto)",
        "--interleave 2 --phase prefill --residual desync-2": "interleave=2 is for a residual that reduces every",
        "--interleave 2 --residual no-communication": "interleave=2 is for a residual that reduces every",
        "--phase trian": "unknown phase 'trian'; did you mean 'train'?",
        "--phase train --prompt-length 9": "--prompt-length belongs to --phase generate and prefill, not train",
        "--phase prefill --new-tokens 9": "--new-tokens belongs to --phase generate, not prefill",
        "--sequence 9": "--sequence belongs to --phase train, not generate",
        "--phase train --sequence 0": "--sequence must be positive, not 0",
        "--phase prefill --plot a.png": "--plot belongs to --phase generate, not prefill",
        "--phase train --residual desync-2": "has no prediction of desync-2's backward pass",
        "--launch explicit --phase train": "is for generate and prefill, not for train: it has no",
        "--launch explicit --hardware v5e": (
            "--launch explicit: v5e starts no all-reduce apart (allowed: auto, chained)"
        ),
        "--interleave 2 --tensor 1": "several ranks: --tensor must be at least 2, not 1",
        "--launch explicitly": "unknown --launch 'explicitly'; did you mean 'explicit'?",
    },
    "--model qwen1.5-moe-a2.7b --hardware h100-nvlink --tensor 4": {
        "--experts exchang --phase train": "unknown --experts 'exchang'; did you mean 'exchange'?",
        "--experts exchange": "--experts exchange is for --phase prefill and train, not generate: decoding always",
        "--experts exchange --model tiny --phase train": "experts=exchange needs experts (model.moe)",
        "--experts exchange --model dense.yaml --phase train": "experts in all layers, not model.moe.dense_layers=1",
        "--experts exchange --phase train --residual ladder,parallel": "not with the residual 'parallel' (allowed:",
        "--experts exchange --phase train --tensor 1": "--tensor must be at least 2, not 1",
        "--experts exchange --phase prefill --prompt-length 1022": "splits --prompt-length 1022 over --tensor 4",
        "--experts exchange --phase train --sequence 1022": "splits --sequence 1022 over --tensor 4",
        "--experts exchange --phase train --capacity 0": "--capacity must be positive, not 0.0",
        "--experts exchange --phase train --capacity nan": "--capacity must be positive, not nan",
        "--experts exchange --phase prefill --residual standard --interleave 2 --batch 3": (
            "interleave=2 halves the rows of a split stream on each device: 3 is an odd"
        ),
        "--capacity 1.25 --phase train": "--capacity 1.25 is for --experts exchange",
    },
}


@pytest.mark.parametrize(
    "words, said",
    [
        (f"{base} {words}", said)
        for base, every in MISTAKES.items()
        for words, said in every.items()
    ],
)
def test_mistakes_are_one_line(words, said, mistake, tmp_path):
    (tmp_path / "dense.yaml").write_text(
        "model: {preset: qwen1.5-moe-a2.7b, d_ff: 64, moe: {dense_layers: 1}}"
    )
    assert said in mistake("predict", *words.split())
