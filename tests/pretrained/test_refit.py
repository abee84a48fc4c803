"""The refit of converted layers: least squares of the dense reference's activations, and what goes
wrong around it.
"""

import functools
import json
import os
import signal
from dataclasses import replace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ladder_jax as lj
from ladder_jax import nn, parallel, pretrained
from ladder_jax.cli import main
from ladder_jax.config import Biases
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.pretrained import convert
from ladder_jax.pretrained.convert import Text, rows_of
from ladder_jax.pretrained.refit import FittedProjections, Pass, Refit, Statistics, folded, refit
from ladder_jax.pretrained.source import REFIT, Key, Stored
from ladder_jax.pretrained.sublayers import Streams, programs
from tests import cases
from tests.covering import full
from tests.pretrained import gguf_files, models
from tests.pretrained.least_squares import TOKENS, as_source, check, normalised
from tests.pretrained.test_convert import ARGUMENTS
from tests.refusals import refused


def small_model(name="standard", **changes):
    """Four layers in float32, with all the biases and norms that a family may have."""
    return cases.model(name, biases=Biases.ALL, qk_norm=True, num_kv_heads=2, **changes)


@functools.cache
def values():
    return cases.parameters(nn.define(small_model(), mesh=parallel.make_mesh()))


@functools.cache
def standard():
    return as_source(values(), small_model())


INPUTS = FittedProjections.INPUTS
BOTH = FittedProjections.BOTH
CASES = [
    ("ladder-2", 2, 1, 2, INPUTS),
    ("parallel-ladder", 2, 1, 2, BOTH),
    ("ladder-fresh", 4, 1, 4, BOTH),
    full("hybrid-list", 2, 2, 2, BOTH),
    full("ladder", 8, 1, 8, BOTH),
    full("hybrid-delay-3-first", 1, 1, 1, BOTH),
    full("hybrid-parallel-ladder", 8, 1, 8, INPUTS),
    full("ladder-fresh", 8, 1, 8, BOTH),
    full("hybrid-fresh", 2, 2, 2, INPUTS),
    full("hybrid-fresh", 2, 1, 1, BOTH),  # emulated ranks
]


@pytest.mark.parametrize("name, ranks, data, tensor, projections", CASES)
def test_the_fit_is_the_least_squares_solution(name, ranks, data, tensor, projections):
    """With four ranks, two share each key/value head of a fresh ladder, and so its fit."""
    model = small_model(name, ranks=ranks if name in cases.DEPEND_ON_RANKS else None)
    shape = cases.shape(name, model, ranks=ranks)
    check(values(), model, shape, projections=projections, data=data, tensor=tensor)


def test_a_model_without_late_inputs_is_left_alone():
    """The control: nothing to predict, nothing fitted; and no change where it is fitted all the
    same.
    """
    for model in (small_model(), small_model("ladder", ladder_layers="0")):
        result = refit(standard(), model=model, rows=TOKENS, mesh=parallel.make_mesh())
        assert result.fits == ()
        assert result.source.arrays == standard().arrays
    run = Pass(nn.define(small_model(), mesh=parallel.make_mesh()), standard(), TOKENS)
    for statistics in run.statistics(0, 0), run.output_statistics(0, 0):
        assert not statistics.changes(1, ridge=1e-3)[0].any()


def test_a_layer_that_adds_nothing():
    """As pruned models have them, or models made deeper: what its output lacks is no number's
    quotient with nothing, and an MLP that computes nothing gives nothing to fit.
    """
    silent = {
        key: Stored(array.shape, array.dtype, functools.partial(np.zeros, array.shape, array.dtype))
        for key, array in standard().arrays.items()
        if key.layer == 1 and key.name.startswith(("layers/attention/out", "layers/mlp/"))
    }
    source = replace(standard(), arrays={**standard().arrays, **silent})
    model = small_model("ladder")
    both = Refit(projections=BOTH)
    result = refit(source, model=model, rows=TOKENS, mesh=parallel.make_mesh(), settings=both)
    shares = {(fit.layer, fit.sublayer): (fit.before, fit.after) for fit in result.fits}
    assert np.isfinite(list(shares.values())).all()
    assert shares[1, "attention/out"] == shares[1, "mlp/down"] == (0, 0)
    for key in silent:
        assert not result.source.arrays[key].read().any()


def test_sums_over_many_batches_stay_within_the_bound():
    """Activations far from zero, where a sum in float32 over all batches would lose the last
    digits.
    """
    definition = nn.define(small_model("ladder"), mesh=parallel.make_mesh(tensor=2))
    chance = np.random.default_rng(0)
    late, whole = (5 + chance.standard_normal((2, 200, 1, 16, 32))).astype(np.float32)
    run = programs(definition).statistics
    of_batch = lambda newest, read: run(Streams((newest, read), np.zeros_like(newest)), np.int32(1))
    total = Statistics.of(map(of_batch, whole, late), width=32)
    late, whole = (
        normalised(x.astype(np.float64), definition.config.norm_eps) for x in (late, whole)
    )
    both = np.concatenate([late, whole - late], axis=1)
    # of the sum over a batch, the mean square, and the division by its root
    roundings = 16 + 32 + 8
    sizes = np.concatenate([abs(late), abs(whole) + abs(late)], axis=1)
    bound = roundings * cases.UNIT_ROUNDOFF * (abs(late).T @ sizes)
    assert (abs(total.products[0] - late.T @ both) <= bound).all()
    assert total.energy == pytest.approx(np.sum(whole**2), rel=1e-6)
    assert total.missing == pytest.approx(np.sum((late - whole) ** 2), rel=1e-4)


def test_bfloat16_is_rounded_once():
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(jnp.bfloat16)
    gain = np.float32([1, 2, 3, 4])
    matrix = np.eye(4) + 0.25
    result = folded(weight, gain, [matrix - np.eye(4)], axis=1)
    exact = matrix @ np.diag(gain.astype(float)) @ weight.astype(np.float64)
    assert result.dtype == jnp.bfloat16
    assert (result == exact.astype(jnp.bfloat16)).all()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("the thin cat sat there then, with that other thing; " * 40)
    (folder / "b.txt").write_text("another hen; in the hat; " * 40)
    return folder


def converted(*words):
    """What `convert SOURCE DESTINATION ...` writes."""
    assert main(["convert", *map(str, words)]) == 0
    return pretrained.open(words[1])


def test_the_verb_refits_and_writes_a_plain_checkpoint(small, texts, tmp_path, capsys, mistake):
    """The same definition, and so the same program, as without a refit; to Hugging Face and back,
    bit for bit.
    """
    words = ["--ladder-layers", 2, "--calibration-tokens", 120]
    words += ["--calibration", f"{texts / 'a.txt'}:3", "--calibration", texts / "b.txt"]
    before = converted(small, tmp_path / "out", *words)
    printed = capsys.readouterr()
    assert "refitted 4 sublayers: the late inputs lacked" in printed.out
    assert "refitted 8/8 sublayers" in printed.err
    told = json.loads((tmp_path / "out" / REFIT).read_text())
    assert (told["tokens"], told["sequence"], told["ridge"]) == (120, 30, 1e-3)
    fitted = [(one["layer"], one["sublayer"]) for one in told["sublayers"]]
    assert fitted == [(2, "attention"), (2, "mlp"), (3, "attention"), (3, "mlp")]

    plain = converted(small, tmp_path / "plain", "--ladder-layers", 2, "--refit", "none")
    after = converted(tmp_path / "out", tmp_path / "hf", "--to", "huggingface")
    lj.from_pretrained(tmp_path / "hf").save(tmp_path / "saved")
    assert pretrained.open(tmp_path / "saved").refit == after.refit == before.refit
    assert before.model == plain.model
    assert not plain.refit
    models.same_arrays(after, before)
    for key, stored in before.arrays.items():
        fitted = key.layer in (2, 3) and not key.name.endswith(("out", "down"))
        assert (stored.read() == plain.arrays[key].read()).all() == (not fitted)

    said = "were refitted for their own layers: leave ladder_layers out, or name"
    with refused(said):
        lj.from_pretrained(tmp_path / "hf", ladder_layers="3")
    capsys.readouterr()
    assert said in mistake("convert", tmp_path / "out", tmp_path / "not", *words[:2])


def parsed(model, **options):
    """The request of `convert` with these options only."""
    return convert.parse(ARGUMENTS | dict(source="", destination="out") | options, model)


def test_rows_are_no_longer_than_the_models_training_sequence(tmp_path, texts):
    """Whether a checkpoint's configuration names it, or another format's; 1,024 where neither
    does.
    """
    file = gguf_files.write(tmp_path / "short.gguf", "llama-2", max_position_embeddings=24)
    named = pretrained.open(file)
    saved = converted(file, tmp_path / "short")
    both = [str(texts / "a.txt"), str(texts / "b.txt")]
    request = parsed(named.model, ladder_layers="auto:1", calibration=both, calibration_tokens=96)
    unknown = replace(saved, context=None)
    for source, shape in (named, (4, 25)), (saved, (4, 25)), (unknown, (2, 49)):
        measured, fitted = convert.read_texts(source, request)
        assert measured.shape == shape
        assert fitted.shape == (shape[0], shape[1] - 1)  # without targets


def test_layers_are_chosen_by_their_refitted_cost(small, texts, tmp_path):
    """Measured on the text's beginning with each layer refitted alone, and then refitted together
    on what follows.
    """
    text = texts / "a.txt"
    words = ["--ladder-layers", "auto:2", "--calibration", text, "--calibration-tokens", 64]
    saved = converted(small, tmp_path / "out", *words, "--search", "ranked")
    told = json.loads((tmp_path / "out/sensitivity.json").read_text())
    source = pretrained.open(small)
    settings = dict(tokenizer=saved.tokenizer, tokens=64)
    measured = rows_of([Text(str(text))], **settings)
    following = rows_of([Text(str(text))], skip=64, **settings)

    def refitted(layers):
        model = replace(source.model, residual="ladder", ladder_layers=layers)
        return refit(source, model=model, rows=following[:, :-1], mesh=parallel.make_mesh()).source

    for layer in (1, 3):  # refitted alone, as in a hybrid with that layer
        alone = loss(refitted(f"{layer},"), measured)
        assert told["curve"][layer]["loss"] == pytest.approx(alone, rel=1e-5)
    models.same_arrays(saved, refitted(saved.model.ladder_layers))


def loss(source, rows):
    definition = nn.define(source.model, mesh=parallel.make_mesh())
    params = pretrained.load(source, mesh=definition.layout.mesh)
    logits = nn.compiled_logits(definition)(params, rows[:, :-1])
    return float(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean())


KILLED = """
import os, signal, sys
from ladder_jax import cli
from ladder_jax.pretrained import refit
kept, done = refit._kept, []
def then_killed(*args):
    done.append(kept(*args))
    if len(done) == 3:
        os.kill(os.getpid(), int(sys.argv[1]))
    return done[-1]
refit._kept = then_killed
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("given, tokens, repeated, projections", [
    ([], 8 * 48, 40, BOTH),
    ([], 8 * 48 - 1, 40, INPUTS),
    ([], 8 * 48, 5, INPUTS),  # which the text does not have
    (["--refit", "both"], 8 * 48 - 1, 40, BOTH),
])  # fmt: skip
def test_the_outputs_are_fitted_where_there_are_tokens_for_it(
    given, tokens, repeated, projections, small, tmp_path, monkeypatch
):
    """By default; of a model whose MLP has 48 features, which are more than those of its heads."""
    text = tmp_path / "text.txt"
    text.write_text("the thin cat sat there then, with that other thing; " * repeated)
    asked = mock.Mock(side_effect=RunFailed("asked"))
    monkeypatch.setattr(convert.refits, "refit", asked)
    monkeypatch.setattr(convert, "SEQUENCE", 1)
    words = ["--ladder-layers", 2, "--calibration", text, "--calibration-tokens", tokens, *given]
    assert main(["convert", *map(str, (small, tmp_path / "out", *words))]) == 1
    assert asked.call_args.kwargs["settings"] == Refit(projections=projections)


@pytest.fixture
def summed(monkeypatch):
    """The statistics that are computed from here on, (run, layer, index)."""
    found = []

    def recorded(method):
        return lambda *where: found.append(where) or method(*where)

    for name in ("statistics", "output_statistics"):
        monkeypatch.setattr(Pass, name, recorded(getattr(Pass, name)))
    return found


@pytest.mark.parametrize(
    "signum, projections, resumed",
    [
        (signal.SIGKILL, INPUTS, 3),
        full(signal.SIGTERM, BOTH, 1 + 8),
    ],
)
def test_killed_and_resumed_bit_for_bit(
    signum, projections, resumed, small, texts, tmp_path, summed, capsys, run_python
):
    """What was fitted is read, not fitted again; the result is that of an undisturbed run."""
    words = ["--ladder-layers", "3", "--refit", projections.value]
    words += ["--calibration", str(texts / "a.txt"), "--calibration-tokens", "128"]
    run = ["-c", KILLED, int(signum), "convert", small, tmp_path / "out"]
    run_python(*run, *words, check_status=-signum)
    left = tmp_path / ".out.converting/refitted"
    assert len(list(left.glob("*.npz"))) == 3
    assert not (tmp_path / "out").exists()
    found = converted(small, tmp_path / "out", *words)
    assert len(summed) == resumed
    printed = capsys.readouterr().out
    assert "refitted 6 sublayers: the late inputs" in printed
    assert ("behind these inputs, the sublayers' outputs lacked" in printed) == (
        projections is BOTH
    )
    # an undisturbed run; of this name, which the folder of what is kept has, too
    models.same_arrays(found, converted(small, tmp_path / "refitted", *words))
    assert sorted(os.listdir(tmp_path)) == ["out", "refitted"]


def test_models_that_cannot_be_refitted():
    infinite = np.full((8, 4, 32), np.inf, np.float32)
    stored = Stored(infinite.shape, infinite.dtype, lambda: infinite)
    arrays = {**standard().arrays, Key("layers/attention/out", 0): stored}
    broken = replace(standard(), arrays=arrays)
    ladder = small_model("ladder")
    for source, mesh, message in (
        (replace(standard(), model=ladder), {}, "starts from a standard model; .* is ladder"),
        (standard(), dict(data=4), "6 rows of text cannot be split over 4 data ranks"),
        (standard(), dict(fsdp=2), "a mesh of data and tensor: mesh.fsdp=1"),
        (broken, {}, "no least squares: .*infs or NaNs"),
    ):
        with pytest.raises((UserError, RunFailed), match=message):
            refit(source, model=ladder, rows=TOKENS, mesh=parallel.make_mesh(**mesh))


def test_other_requests_resume_nothing(tmp_path):
    """What was kept of other tokens, or another ridge, is not read; an equal one resumes, in the
    source's own folder too.
    """
    source = replace(standard(), path=str(tmp_path))
    counts = []
    always = dict(model=small_model("ladder"), mesh=parallel.make_mesh())
    for change in dict(), dict(rows=TOKENS[::-1]), dict(settings=Refit(ridge=0.1)), dict():
        request = {"rows": TOKENS, **always, **change}
        kept = refit(source, folder=tmp_path / ".kept", **request)
        counts.append(len(list((tmp_path / ".kept").iterdir())))
        models.same_arrays(kept.source, refit(source, **request).source)
    assert counts == [counts[0] * times for times in (1, 2, 3, 3)]
