"""`ladder-jax bench` as a user meets it, and its arithmetic against sums made another way. No time
is judged.
"""

import contextlib
import io
import json
import os
import statistics
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import cli, decode, nn, parallel
from ladder_jax.bench import measure, request as requests, result
from ladder_jax.bench.request import Variant
from ladder_jax.checkpoint.arrays import named
from ladder_jax.config import Loop, preset
from ladder_jax.decode import weights
from ladder_jax.predict import measure as limits
from ladder_jax.predict.work import Model
from tests.test_memory import exhausted

ASKED = "--model tiny --residual standard,ladder --prompt-length 8 --new-tokens 5 --warmup 1 --repeats 2".split()


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """The JSON of one run on 8 simulated devices, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("bench")
    out = io.StringIO()
    words = [*ASKED, *"--layers 1 --batch 1,2 --json --out speed.json --plot speed.png".split()]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(folder)
        patch.setattr(limits, "REPEATS", 2)  # of copies and matmuls
        # two rows are timed for one as well, in place of two more programs a topology
        generation = measure._generation
        patch.setattr(measure, "_generation", lambda *asked: generation(*asked[:-1], 2))
        assert cli.main(["bench", *words]) == 0
    assert len(out.getvalue().splitlines()) == 1
    return json.loads(out.getvalue()), folder


def test_json(answer):
    found, folder = answer
    asked = dict(model="tiny", devices=8, tensor=8, layers=1, warmup=1, repeats=2)
    assert asked.items() <= found.items()
    assert found["device"].endswith(" CPU")
    assert found["versions"]["jax"] == jax.__version__
    assert {"python", "flax"} <= set(found["versions"])
    names = [(row["batch"], row["residual"]) for row in found["rows"]]
    assert names == [(1, "standard"), (1, "ladder"), (2, "standard"), (2, "ladder")]
    assert "never overlaps communication" in found["notices"][0]
    assert json.loads((folder / "speed.json").read_text()) == found
    assert sorted(os.listdir(folder)) == ["speed.json", "speed.png"]
    assert (folder / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_name_ends_under_its_bar(monkeypatch):
    """In the middle it would be written over the next one's."""
    drawn = []
    monkeypatch.setattr(result.files, "write_picture", lambda _, figure: drawn.append(figure))
    names = [Variant("standard", 2), Variant("ladder", 1)]
    keys = ("tokens_per_second", "tokens_per_second_min", "tokens_per_second_max")
    rows = [dict.fromkeys(keys, 9.0) | {"batch": 1}] * len(names)
    asked = types.SimpleNamespace(batches=[1], variants=names, prompt_length=8, new_tokens=5)
    result._plot(types.SimpleNamespace(request=asked, rows=rows, title=""), file="speed.png")
    labels = drawn[0].axes[0].get_xticklabels()
    assert [one.get_text() for one in labels] == ["standard in two halves", "ladder"]
    assert all(one.get_ha() == "right" for one in labels)


def test_the_rows_can_be_recomputed(answer):
    found, _ = answer
    copy = found["copy"]["bytes_per_second"]
    matmul = found["matmul"]["flops_per_second"]
    for row in found["rows"]:
        assert (row["prompt_length"], row["new_tokens"]) == (8, 5)
        assert len(row["decode_seconds_each"]) == 2
        prefill, decoding = (
            statistics.median(row[f"{name}_seconds_each"]) for name in ("prefill", "decode")
        )
        assert min(prefill, decoding) > 0
        expected = dict(
            step_seconds=decoding / 4,
            tokens_per_second=row["batch"] * 5 / (prefill + decoding),
            bandwidth_share=bytes_by_hand(8, batch=row["batch"], layers=1) / (decoding / 4) / copy,
            matmul_share=row["prefill_flops"] / prefill / matmul,
        )
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9)
    ratios = [(ratio["residual"], ratio["against"], ratio["batch"]) for ratio in found["ratios"]]
    assert ratios == [("ladder", "standard", 1), ("ladder", "standard", 2)]


def test_what_is_copied_fits_into_the_devices_memory(monkeypatch):
    """A CPU's array is of 128 MiB, or an eighth of what is free."""
    monkeypatch.setattr(limits, "timed", lambda run, *, of: (1.0,))
    copied = lambda free: limits.copy_bandwidth(jax.devices()[0], free=free).array
    assert copied(8 << 20) == "1 MiB of uint32"
    assert copied(None) == copied(16 << 30) == "128 MiB of uint32"


@pytest.fixture
def ceilings(monkeypatch):
    """What a copy and a matmul are measured to reach."""
    for name in ("copy_bandwidth", "matmul_peak"):
        monkeypatch.setattr(limits, name, lambda *_, **__: CEILING)


@pytest.fixture
def told(prints, monkeypatch, ceilings):
    """What the command prints, in this process and with given ceilings."""
    monkeypatch.setenv("COLUMNS", "80")
    return lambda words: prints("bench", *ASKED, *words.split())


def test_text(told, monkeypatch):
    names = "ladder-fresh", "parallel-shared-norm"
    made = fabricated(*[(2, (1, 2), (4, 5))] * 2, residuals=names)
    monkeypatch.setattr(measure, "samples", lambda *_, **__: made.samples)
    said = told(f"--layers 1 --batch 2 --tensor 1 --residual {','.join(names)}").splitlines()
    assert max(map(len, said)) <= 80
    assert said[0].startswith("parallel-shared-norm decodes ")
    assert "x ladder-fresh [" in said[0]
    assert said[1].startswith("note: one device communicates nothing")
    for begin in ("tiny, 1 layers, tensor 1 on ", "copy", "matmul", "versions"):
        assert any(line.startswith(begin) for line in said)


def test_one_ranks_share(told):
    """It moves and computes what the rank does of the whole: nothing is counted of what others
    hold.
    """
    found = json.loads(
        told("--layers 1 --batch 1 --json --share 8 --interleave 1,2 --residual ladder")
    )
    assert (found["tensor"], found["share"]) == (1, 8)
    assert "a rank's share of tensor parallelism over 8" in found["notices"][0]
    variants = [(row["residual"], row["interleave"]) for row in found["rows"]]
    assert variants == [("ladder", 1), ("ladder", 2)]
    whole = Model(preset("tiny", num_layers=1, residual="ladder"), 8)
    for row in found["rows"]:
        assert row["bytes_per_step"] == bytes_by_hand(8, batch=1, layers=1)
        assert row["prefill_flops"] == measure.prefill_flops(whole, rows=1, prompt_length=8)


# The presets' shapes by hand: tiny is D 128, 8 heads of 16, 4 key/value heads, F 352, V 256,
# untied.


def bytes_by_hand(tensor, *, batch, layers=2):
    queries = 8 // tensor * 16
    keys = max(1, 4 // tensor) * 16
    features = 352 // tensor
    matrices = layers * 128 * (2 * queries + 2 * keys + 3 * features)
    vocabulary = -(-256 // (128 * tensor)) * 128
    gains = 128 * (2 * layers + 1)
    positions = statistics.mean(range(9, 13))  # after a prompt of 8, for four more tokens
    lookup = 128 * batch
    cache = 2 * layers * batch * keys * positions
    return 2 * (matrices + vocabulary * 128 + lookup + cache) + 4 * gains  # gains are float32


@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_decode_bytes(tensor):
    one = Model(preset("tiny", num_layers=2, residual="standard"), tensor)
    assert measure.decode_bytes(one, rows=3, prompt_length=8, new_tokens=5) == bytes_by_hand(
        tensor, batch=3
    )


@pytest.mark.parametrize("name, rows, prompt", [("ladder-1b", 2, 256), ("smollm2-135m", 2, 128)])
def test_prefill_flops_are_the_compilers(name, rows, prompt):
    ours = Model(preset(name, num_layers=1, residual="standard"), 1)
    one = nn.define(ours.config, mesh=parallel.make_mesh())
    params = weights.abstract(one, loop=Loop.UNROLLED)
    tokens = jnp.zeros((rows, prompt), jnp.int32)
    lowered = decode.prefill(one, capacity=prompt).lower(params, tokens, tokens[:, 0])
    counted = lowered.cost_analysis()["flops"]
    # Attention on a CPU computes the masked half of the scores too.
    heads = one.config.num_heads * one.config.head_dim
    masked = rows * heads * 4 * prompt * (prompt - 1) / 2
    assert measure.prefill_flops(ours, rows=rows, prompt_length=prompt) == pytest.approx(
        counted - masked, rel=0.02
    )


def test_weights_are_made_once_in_the_compute_dtype():
    """Eight devices and four key/value heads: some devices hold the same head."""
    mesh = parallel.make_mesh(tensor=8)
    names = ("standard", "parallel-shared-norm")
    definitions = [
        nn.define(preset("tiny", num_layers=1, residual=name), mesh=mesh) for name in names
    ]
    standard, shared = map(named, measure.random_weights(definitions))
    assert set(standard) - set(shared) == {"layers/mlp_norm/scale"}
    assert all(shared[name] is standard[name] for name in shared)
    assert (np.asarray(standard["final_norm/scale"]) == 1).all()


def test_repeated_products_neither_grow_nor_vanish(monkeypatch):
    """Of the measured matmul: numbers that vanish or overflow take another time on some
    machines.
    """
    made = []
    monkeypatch.setattr(limits, "_rates", lambda step, x, **_: made.append(step(step(x))) or (1.0,))
    limits.matmul_peak(jax.devices()[0], dtype="float32")
    assert float(made[0].std()) == pytest.approx(len(made[0]) ** -0.5, rel=0.05)


CEILING = limits.Ceiling((90e9, 100e9), "an array")


def fabricated(*samples, residuals=("standard", "ladder"), interleaves=(1,)):
    """A result of samples (batch, prefill seconds, decode seconds), one a variant."""
    asked = requests.Request(
        "tiny",
        preset("tiny"),
        residuals=residuals,
        batches=(1,),
        interleaves=interleaves,
        prompt_length=8,
        new_tokens=5,
        repeats=3,
        tensor=2,
    )
    counted = dict(step_bytes=1e6, prefill_flops=10**9)
    both = zip(samples, asked.variants, strict=True)
    samples = tuple(measure.Samples(variant, *one, **counted) for one, variant in both)
    return result.Result(
        asked, CEILING, CEILING, samples, device="a device", devices=2, versions={}, platform="tpu"
    )


def test_ratios_are_of_rounds():
    """A machine that slows down by half in the second round changes no ratio."""
    slow = fabricated((1, (1, 2, 1), (4, 8, 4)), (1, (1, 2, 1), (2, 4, 1)))
    assert slow.verdict == ["ladder decodes 2.00x standard [2.00, 4.00] at batch 1"]
    assert slow.ratios[0]["prefill_ratio_min"] == slow.ratios[0]["prefill_ratio_max"] == 1
    assert slow.rows[1]["tokens_per_second"] == 5 / (1 + 2)
    assert slow.rows[1]["tokens_per_second_max"] == 5 / 2
    samples = (1, (4, 8, 4), (1, 2, 1)), (1, (2, 4, 1), (1, 2, 1))
    assert fabricated(*samples, residuals=("standard",), interleaves=(1, 2)).verdict == [
        "standard in two halves prefills 2.00x standard [2.00, 4.00] at batch 1"
    ]
    assert fabricated(*samples, interleaves=(2,)).verdict == [
        "ladder in two halves prefills 2.00x standard in two halves [2.00, 4.00] at batch 1"
    ]
    alone = fabricated((1, (1,), (4,)), residuals=("ladder",))
    assert alone.verdict == alone.ratios == []


def test_numbers():
    assert [result.number(x) for x in (1234.5, 99.96, 1.2345, 0.00012345)] == [
        "1,234",
        "100",
        "1.23",
        "0.000123",
    ]


def test_a_value_that_stands_twice_counts_once():
    asked = requests.make(model="tiny", residual="ladder,ladder", batch="1,2,1", interleave="2,2")
    assert (asked.batches, asked.variants) == ((1, 2), (Variant("ladder", 2),))


MISTAKES = {
    "--model tinny": "unknown preset 'tinny'; did you mean 'tiny'? (allowed: tiny,",
    "--residual standard,lader": "unknown residual 'lader'; did you mean 'ladder'? (allowed: standard,",
    "--residual ladder,": "unknown residual ''",
    "--interleave 3": "interleave must be 1 (the whole batch) or 2 (two halves of it in turn), not 3",
    "--interleave two": "--interleave must be positive numbers, as in 1,4,16, not 'two'",
    "--residual desync-2 --interleave 2": "interleave=2 is for a residual that reduces every sublayer's output",
    "--batch 0": "--batch must be positive numbers, as in 1,4,16, not '0'",
    "--batch 1,-4": "--batch must be positive numbers, as in 1,4,16, not '-4'",
    "--batch 1,four": "--batch must be positive numbers, as in 1,4,16, not 'four'",
    "--prompt-length 0": "--prompt-length must be positive, not 0",
    "--new-tokens 1": "--new-tokens must be at least 2, not 1",
    "--tensor 3": "--tensor 3 does not split this model over this machine, of 8 devices (allowed: 1, 2, 4, 8)",
    "--tensor 16": "--tensor 16 does not split this model over this machine, of 8 devices (allowed: 1, 2, 4, 8)",
    "--share 3": "model.num_heads=8 is not divisible by mesh.tensor=3",
    "--share 0": "--share must be positive, not 0",
    "--model tiny-moe --residual ladder --share 2": "--share is for dense models",
    "--share 8 --tensor 2": "--share runs one rank on one device: leave --tensor 2 out",
    "--model llama-3-8b --tensor 16": "--tensor 16 does not split this model",
    "--model smollm2-135m": "--tensor 8 does not split this model over this machine, of 8 devices (allowed: 1, 3)",
    "--warmup 0": "--warmup must be positive, not 0",
    "--repeats -1": "--repeats must be positive, not -1",
    "--layers 0": "--layers must be positive, not 0",
    "--layers some": "invalid int value: 'some'",
    "--repeat 3 --plots x": "unknown option '--plots'; did you mean '--plot'?",
    "--plot speed.gif": "--plot speed.gif: the file must end in .png or .svg or .pdf",
    "--out nowhere/speed.json": "--out nowhere/speed.json: there is no folder nowhere",
    "--out .": "--out .: this is a folder; name a file in it",
    "--model llama-3.1-405b --batch 64": "llama-3.1-405b at batch 64 needs ",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_one_line_and_measure_nothing(words, mistake, monkeypatch):
    monkeypatch.setattr(limits, "copy_bandwidth", None)
    assert MISTAKES[words] in mistake(
        "bench", *ASKED, "--out", "speed.json", "--plot", "speed.png", *words.split()
    )


def test_running_out_of_memory_is_one_line(mistake, monkeypatch, ceilings):
    monkeypatch.setattr(measure, "random_weights", exhausted)
    said = mistake("bench", *ASKED, "--out", "speed.json")
    assert said.startswith(
        "ladder-jax: out of memory benchmarking (RESOURCE_EXHAUSTED: Out of memory allocating 9 "
    )
    assert "ask for a smaller --batch" in said
