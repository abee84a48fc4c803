"""The refit of converted layers: least squares of the dense reference's activations, and what goes wrong around it."""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from ladder_jax import checkpoint, nn, parallel, pretrained
from ladder_jax.cli import main
from ladder_jax.cli.verbs import VERBS
from ladder_jax.config import Biases
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.nn.parameter import STACKS
from ladder_jax.pretrained import convert
from ladder_jax.pretrained.convert import Text, parse_text, rows_of
from ladder_jax.pretrained.refit import FittedProjections, Pass, Refit, Statistics, fitted_inputs, folded, refit
from ladder_jax.pretrained.source import REFIT, Key, Source, Stored
from ladder_jax.pretrained.sublayers import Streams, programs
from tests import cases, reference
from tests.pretrained import gguf_files

ROOT = pathlib.Path(__file__).parent.parent.parent
RIDGE = 1e-2
TOKENS = cases.tokens((5, 30), seed=4)
SUBLAYERS = ("attention", "mlp")
EXPERTS = ("router", "experts/gate", "experts/up", "shared/gate", "shared/up", "shared/share")
READERS = {"attention": ("query", "key", "value"), "mlp": ("gate", "up", *EXPERTS)}
WRITERS = {"attention": "out", "mlp": "down"}


def small_model(name: str = "standard", **changes):
    """Four layers in float32, with all the biases and norms that a family may have."""
    return cases.model(name, biases=Biases.ALL, qk_norm=True, **changes)


@functools.cache
def values():
    return cases.parameters(nn.define(small_model(), mesh=parallel.make_mesh()))


@functools.cache
def standard() -> Source:
    return as_source(values(), small_model())


def test_a_source_needs_no_file():
    source = dataclasses.replace(standard(), path="in memory")
    model = small_model("ladder", ladder_layers="1")
    result = refit(source, model=model, rows=TOKENS, mesh=parallel.make_mesh())
    assert [fit.layer for fit in result.fits] == [3, 3] and result.source.path == "in memory"


def as_source(params, model) -> Source:
    arrays = {}
    for name, stack in traverse_util.flatten_dict(params, sep="/").items():
        one = lambda array: Stored(array.shape, array.dtype, lambda: array)
        if name.partition("/")[0] in STACKS:
            arrays |= {Key(name, layer): one(array) for layer, array in enumerate(stack)}
        else:
            arrays[Key(name)] = one(stack[: model.vocab_size] if name.endswith("table") else stack)
    return Source(__file__, model, arrays)


def expected(params, shape: reference.Shape, *, both: bool = False):
    """The fitted arrays, {(layer, array): values}, and how far float32 activations may move them.

    Every activation is there at once, in float64, and each M is the solution of one stacked least-squares problem.
    """
    original = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    fitted, found, amplified = jax.tree.map(np.copy, original), {}, 0.0
    dense = len(params["dense"]["attention_norm"]["scale"]) if "dense" in params else 0
    farskip, delays = shape.kind == "farskip", (2, 3) if shape.kind == "parallel-ladder" else (shape.number,) * 2
    alone = dataclasses.replace(shape, layers=0, vocab=0, kind="farskip" if farskip else "", number=1, ladder=None)
    norm = lambda x: (x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.eps)).reshape(-1, x.shape[-1])
    # early: what a farskip's last experts gave that their successor does not leave out
    xs, newest, early = [original["embedding"]["table"][TOKENS]], None, 0.0
    for i in range(1, 2 * shape.layers + 1):
        layer, index, sublayer = (i - 1) // 2, (i - 1) % 2, SUBLAYERS[(i - 1) % 2]
        stack, place = ("dense", layer) if layer < dense else ("layers", layer - dense)
        own, before = fitted[stack][sublayer], original[stack][sublayer]
        chosen = shape.ladder is None or layer in shape.ladder
        behind_dense = farskip and index == 0 and layer <= dense  # which leaves nothing pending
        delay = min(delays[index], i - 1) if chosen and not behind_dense else 0
        inputs = np.stack([xs[i - 1 - delay]] * shape.ranks)
        if delay:
            inputs = inputs + (newest if shape.kind == "fresh" else early if index == 0 else 0.0)
            gain = fitted[stack][f"{sublayer}_norm"]["scale"]
            for array, weights in traverse_util.flatten_dict(before, sep="/").items():
                if array in READERS[sublayer]:
                    fit = fit_of_experts if array.startswith("experts/") else fit_by_ranks
                    values, factor = fit(weights[place], gain[place], norm, inputs, xs[i - 1])
                    at(own, array)[place] = found[layer, f"{sublayer}/{array}"] = values
                    amplified = max(amplified, factor)
            gain[place] = 1.0
        about = alone if layer >= dense else dataclasses.replace(alone, kind="", experts=None)
        parts = functools.partial(reference_output, layer=place, attends=index == 0, shape=about)
        output = lambda params, x: parts(params, x).reshape(-1, *x.shape).sum(0)  # farskip's experts are two parts
        newest = output(fitted[stack], inputs)
        if delay and both and (writes := WRITERS[sublayer]) in own:
            lacking = (output(original[stack], np.stack([xs[i - 1]] * shape.ranks)) - newest).sum(0)
            read = hidden(fitted[stack], place, sublayer, lambda these: output(these, inputs).sum(0))
            change, factor = stacked_least_squares(read, lacking.reshape(len(read), -1), prior=0)
            own[writes][place] += change.reshape(own[writes][place].shape)
            found[layer, f"{sublayer}/{writes}"] = own[writes][place].copy()
            amplified = max(amplified, factor)
            newest = output(fitted[stack], inputs)
        if index == 1:
            early = parts(fitted[stack], inputs)[1].sum(0) if farskip and chosen and layer >= dense else 0.0
        xs.append(xs[-1] + newest.sum(0))
    return found, amplified


def fit_by_ranks(weight, gain, norm, inputs, whole):
    """A projection [D, ...] of each rank's own input; where several ranks share a part of it, they share its fit."""
    parts = min((len(inputs), *weight.shape[1:2]))
    split = np.split(weight, parts, axis=1) if parts > 1 else [weight]
    columns, factors = [], []
    for part, group in zip(split, np.split(inputs, parts)):
        late = np.concatenate([norm(x) for x in group])
        matrix, factor = stacked_least_squares(late, np.concatenate([norm(whole)] * len(group)))
        columns.append(np.tensordot(matrix * gain[None], part, 1))
        factors.append(factor)
    return columns[0] if parts == 1 else np.concatenate(columns, axis=1), max(factors)


def fit_of_experts(weight, gain, norm, inputs, whole):
    """Every expert's [D, M], of one input."""
    matrix, factor = stacked_least_squares(norm(inputs[0]), norm(whole))
    return np.einsum("ij,ejm->eim", matrix * gain[None], weight), factor


def at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def check(result, wanted, amplified, *, source, model):
    """The fitted arrays are the wanted ones, gains became ones, and nothing else is touched."""
    key = lambda layer, array: Key.of_layer(layer, array, model=model)
    sublayer = lambda array: array if array in ("attention/out", "mlp/down") else array.partition("/")[0]
    fits = {(fit.layer, fit.sublayer) for fit in result.fits}
    assert fits == {(layer, sublayer(array)) for layer, array in wanted} and len(fits) == len(result.fits)
    assert all(fit.after < fit.before for fit in result.fits)
    for (layer, array), values in wanted.items():
        actual = result.source.arrays[key(layer, array)].read()
        assert actual.dtype == np.float32
        assert cases.error(actual, values) <= amplified * cases.bound(model), (layer, array)
    gains = {key(layer, f"{name}_norm/scale") for layer, name in fits if name in SUBLAYERS}
    assert all((result.source.arrays[gain].read() == 1).all() for gain in gains)
    changed = {key for key, stored in source.arrays.items() if result.source.arrays[key] is not stored}
    assert changed == gains | {key(*array) for array in wanted}


def reference_output(layers, inputs, *, layer, attends, shape) -> np.ndarray:
    """Each rank's partial sum [R, B, T, D] in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        layers = jax.tree.map(jnp.asarray, layers)
        return np.asarray(reference.sublayer(layers, layer, inputs, attends=attends, shape=shape))


def hidden(layers, layer, sublayer, output) -> np.ndarray:
    """What the output projection reads, [n, M]: the output where that copies D columns, and again for the next D."""
    copied = jax.tree.map(np.copy, layers)
    array = copied[sublayer][WRITERS[sublayer]][layer]
    if (bias := f"{WRITERS[sublayer]}_bias") in copied[sublayer]:
        copied[sublayer][bias][layer] = 0
    count, width = array.size // array.shape[-1], array.shape[-1]
    columns = []
    for start in range(0, count, width):
        array[...] = np.eye(count, width, k=-start).reshape(array.shape)
        columns.append(output(copied).reshape(-1, width)[:, : count - start])
    return np.concatenate(columns, axis=1)


def stacked_least_squares(late, whole, *, prior=1):
    """argmin |late M - whole|^2 + l |M - prior|^2, and the factor by which a small relative error of both enters M.

    The factor is k + k^2 |r| / (|A| |M|), of the least-squares solution's perturbation (Golub & Van Loan, 5.3.7).
    """
    penalty = np.sqrt(RIDGE * np.sum(late * late) / late.shape[1]) * np.eye(late.shape[1])
    wanted = prior * penalty if late.shape[1] == whole.shape[1] else np.zeros((late.shape[1], whole.shape[1]))
    rows, targets = np.concatenate([late, penalty]), np.concatenate([whole, wanted])
    matrix, *_ = np.linalg.lstsq(rows, targets)
    singular = np.linalg.svd(rows, compute_uv=False)
    ratio = np.linalg.norm(rows @ matrix - targets, 2) / (singular[0] * np.linalg.norm(matrix, 2))
    condition = singular[0] / singular[-1]
    return matrix, condition + condition**2 * ratio


INPUTS, BOTH = FittedProjections.INPUTS, FittedProjections.BOTH
CASES = [
    ("ladder", 1, 8, BOTH), ("ladder-2", 1, 2, INPUTS), ("parallel-ladder", 1, 4, BOTH), ("hybrid-list", 2, 2, BOTH),
    ("ladder-fresh", 1, 8, BOTH), ("hybrid-fresh", 2, 2, INPUTS),
]  # fmt: skip
OTHERS = [
    ("ladder", 1, 1, INPUTS), ("hybrid-delay-3-first", 1, 1, BOTH), ("hybrid-parallel-ladder", 1, 8, INPUTS),
    ("ladder-fresh", 1, 2, INPUTS), ("ladder-fresh", 1, 4, BOTH), ("hybrid-fresh", 2, 2, BOTH),
]  # fmt: skip
OTHERS = [pytest.param(*case, marks=pytest.mark.full) for case in OTHERS]


@pytest.mark.parametrize("name, data, tensor, projections", CASES + OTHERS)
def test_the_fit_is_the_least_squares_solution(name, data, tensor, projections):
    """On real ranks. With eight, two share each key/value head of a fresh ladder, and so its fit."""
    model = small_model(name, ranks=tensor if name in cases.DEPEND_ON_RANKS else None)
    settings = Refit(ridge=RIDGE, projections=projections)
    mesh = parallel.make_mesh(data=data, tensor=tensor)
    result = refit(standard(), model=model, rows=TOKENS, mesh=mesh, settings=settings)
    wanted = expected(values(), cases.shape(name, model, ranks=tensor), both=projections is BOTH)
    check(result, *wanted, source=standard(), model=model)


@pytest.mark.full
def test_emulated_ranks_are_real_ones():
    model = small_model("hybrid-fresh", ranks=2)
    settings = dict(model=model, rows=TOKENS, settings=Refit(ridge=RIDGE, projections=BOTH))
    real, emulated = (refit(standard(), mesh=parallel.make_mesh(tensor=n), **settings) for n in (2, 1))
    _, amplified = expected(values(), cases.shape("hybrid-fresh", model, ranks=2), both=True)
    for key, stored in real.source.arrays.items():
        assert cases.error(emulated.source.arrays[key].read(), stored.read()) <= amplified * cases.bound(model)


def test_a_model_without_late_inputs_is_left_alone():
    """The control: nothing to predict, nothing fitted; and M is the identity where it is fitted all the same."""
    for model in (small_model(), small_model("ladder", ladder_layers="0")):
        result = refit(standard(), model=model, rows=TOKENS, mesh=parallel.make_mesh())
        assert result.fits == () and result.source.arrays == standard().arrays
    definition = nn.define(small_model(), mesh=parallel.make_mesh())
    run = Pass(definition, standard(), TOKENS)
    assert not run.output_statistics(0, 0).matrices(1, ridge=1e-3)[0].any()
    (matrix,) = run.statistics(0, 0).matrices(1, ridge=1e-3)
    assert np.abs(matrix - np.eye(32)).max() <= 32 * 2.0**-24 / 1e-3  # of sums in float32 that are not quite symmetric


def test_a_second_sweep_changes_nothing():
    """The inputs of a sublayer depend on the sublayers before it alone: fitted again, each array is what it is."""
    model, mesh = small_model("ladder-2"), parallel.make_mesh()
    source = refit(standard(), model=model, rows=TOKENS, mesh=mesh).source
    run = Pass(nn.define(model, mesh=mesh), source, TOKENS)
    run.original = standard()
    for layer in range(model.num_layers):
        for index in (0, 1):
            if run.late(layer, index):
                again, _ = fitted_inputs(run, layer, index, ridge=Refit().ridge)
                assert all((source.arrays[key].read() == array).all() for key, array in again.items())
            run.advance(layer, index)


def test_each_layer_alone_is_fitted_behind_the_original():
    """As if it were the only converted one: the same as of a hybrid with that layer."""
    settings = dict(rows=TOKENS, mesh=parallel.make_mesh())
    alone = refit(standard(), model=small_model("ladder"), settings=Refit(alone=True), **settings)
    assert [(f.layer, f.sublayer) for f in alone.fits][:2] == [(0, "mlp"), (1, "attention")]
    for layer in (1, 3):
        single = refit(standard(), model=small_model("ladder", ladder_layers=f"{layer},"), **settings)
        for key, stored in single.source.arrays.items():
            if key.layer == layer:
                assert (stored.read() == alone.source.arrays[key].read()).all()


def test_sums_over_many_batches_stay_within_the_bound():
    """Activations far from zero, where a sum in float32 over all batches would lose the last digits."""
    definition = nn.define(small_model("ladder"), mesh=parallel.make_mesh(tensor=2))
    chance, total, count = np.random.default_rng(0), Statistics(prior=1), 200
    streams = (5 + chance.standard_normal((2, count, 2, 16, 32))).astype(np.float32)
    run = programs(definition).statistics
    for late, whole in zip(*streams):
        batch = Streams((whole, late), np.zeros_like(whole))
        products, energy, missing = run(batch, np.float32([1, 0]), jnp.int32(1))  # the second row is padding
        total.add(np.asarray(products), energy, np.asarray(missing)[:1])
    norm = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + definition.config.norm_eps)
    late, whole = (norm(x[:, 0].astype(np.float64)).reshape(-1, 32) for x in streams)
    exact = np.concatenate([late.T @ late, late.T @ whole], axis=1)
    sizes = np.concatenate([abs(late).T @ abs(late), abs(late).T @ abs(whole)], axis=1)
    roundings = 16 + 32 + 8  # of the sum over a batch, the mean square, and the division by its root
    assert (abs(total.products[0] - exact) <= roundings * cases.UNIT_ROUNDOFF * sizes).all()
    assert total.energy == pytest.approx(np.sum(whole**2), rel=1e-6)
    assert total.share_missing() == pytest.approx(np.sum((late - whole) ** 2) / np.sum(whole**2), rel=1e-4)


def test_bfloat16_is_rounded_once():
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(jnp.bfloat16)
    gain, matrix = np.float32([1, 2, 3, 4]), np.eye(4) + 0.25
    result = folded(weight, gain, [matrix], axis=1)
    exact = matrix @ np.diag(gain.astype(float)) @ weight.astype(np.float64)
    assert result.dtype == jnp.bfloat16 and (result == exact.astype(jnp.bfloat16)).all()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Four layers, in a GGUF file of float32."""
    return gguf_files.write(tmp_path_factory.mktemp("small") / "small.gguf", "llama-2", num_hidden_layers=4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("the thin cat sat there then, with that other thing; " * 40)
    (folder / "b.txt").write_text("another hen; in the hat; " * 40)
    return folder


def test_the_verb_refits_and_writes_a_plain_checkpoint(small, texts, tmp_path, capsys):
    """The same definition, and so the same program, as without a refit; to Hugging Face and back, bit for bit."""
    convert = ["convert", str(small), str(tmp_path / "out"), "--ladder-layers", "2"]
    calibration = ["--calibration", f"{texts / 'a.txt'}:3", "--calibration", str(texts / "b.txt")]
    assert main([*convert, *calibration, "--calibration-tokens", "120"]) == 0
    printed, told = capsys.readouterr(), json.loads((tmp_path / "out" / "refit.json").read_text())
    assert "refitted 4 sublayers: the late inputs lacked" in printed.out and "refitted 8/8 sublayers" in printed.err
    assert (told["tokens"], told["sequence"], told["ridge"]) == (120, 30, 1e-3)
    assert [(one["layer"], one["sublayer"]) for one in told["sublayers"]] == [
        (2, "attention"), (2, "mlp"), (3, "attention"), (3, "mlp")
    ]  # fmt: skip
    convert[2] = str(tmp_path / "plain")
    assert main([*convert, "--refit", "none"]) == 0
    refitted, plain = (checkpoint.open_checkpoint(tmp_path / name) for name in ("out", "plain"))
    assert refitted.config.model == plain.config.model
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    assert (tmp_path / "hf" / REFIT).read_bytes() == (tmp_path / "out" / REFIT).read_bytes()
    assert pretrained.open(tmp_path / "hf").refit and not pretrained.open(tmp_path / "plain").refit
    before, after = pretrained.open(tmp_path / "out"), pretrained.open(tmp_path / "hf")
    original = pretrained.open(small)
    for key, stored in before.arrays.items():
        values = stored.read()
        assert (after.arrays[key].read() == values).all()
        fitted = key.layer in (2, 3) and not key.name.endswith(("out", "down"))
        assert (values == original.arrays[key].read()).all() == (not fitted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "plain"]


def test_rows_are_no_longer_than_the_models_training_sequence(tmp_path, texts):
    """Whether a checkpoint's configuration names it, or another format's; 1,024 where neither does."""
    file = gguf_files.write(tmp_path / "short.gguf", "llama-2", max_position_embeddings=24)
    assert main(["convert", str(file), str(tmp_path / "short")]) == 0
    choice = dict.fromkeys("ladder_layers residual ranks dtype calibration_tokens refit ridge search tensor".split())
    choice |= {"source": "", "destination": str(tmp_path / "out"), "to": "checkpoint", "ladder_layers": "auto:1"}
    choice["calibration"] = [str(texts / "a.txt"), str(texts / "b.txt")]
    for source in map(pretrained.open, (file, tmp_path / "short")):
        measured, fitted = convert.read_texts(source, convert.parse({**choice, "calibration_tokens": 96}, source.model))
        assert measured.shape == fitted.shape == (4, 25)
    unknown = dataclasses.replace(source, context=None)
    _, fitted = convert.read_texts(unknown, convert.parse({**choice, "calibration_tokens": 96}, source.model))
    assert fitted.shape == (2, 49)


def test_layers_are_chosen_by_their_refitted_cost(small, texts, tmp_path, capsys):
    """Measured on the text's beginning with each layer refitted alone, and then refitted together on what follows."""
    file, tokens = str(texts / "a.txt"), 64
    choice = ["--ladder-layers", "auto:2", "--calibration", file, "--calibration-tokens", str(tokens)]
    assert main(["convert", str(small), str(tmp_path / "out"), *choice, "--search", "ranked"]) == 0
    assert "(taken)" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    source = pretrained.open(small)
    tokenizer = checkpoint.open_checkpoint(tmp_path / "out").tokenizer()
    settings = dict(tokenizer=tokenizer, tokens=tokens, vocab_size=129)
    measured = rows_of([Text(file)], **settings)
    following = rows_of([Text(file)], skip=tokens, **settings)
    model = dataclasses.replace(source.model, residual="ladder", ladder_layers="3,")
    single = refit(source, model=model, rows=following[:, :-1], mesh=parallel.make_mesh()).source
    assert told["curve"][3]["loss"] == pytest.approx(loss(single, measured), rel=1e-5)
    saved = pretrained.open(tmp_path / "out")
    chosen = dataclasses.replace(source.model, residual="ladder", ladder_layers=saved.model.ladder_layers)
    together = refit(source, model=chosen, rows=following[:, :-1], mesh=parallel.make_mesh()).source
    for key, stored in together.arrays.items():
        assert (saved.arrays[key].read() == stored.read()).all()


def loss(source: Source, rows: np.ndarray) -> float:
    definition = nn.define(source.model, mesh=parallel.make_mesh())
    params = pretrained.load(source, mesh=definition.layout.mesh)
    scores = np.asarray(nn.compiled_logits(definition)(params, rows[:, :-1]), np.float64)
    scores -= scores.max(-1, keepdims=True)
    picked = np.take_along_axis(scores, rows[:, 1:, None], -1)[..., 0]
    return float((np.log(np.exp(scores).sum(-1)) - picked).mean())


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


STATISTICS = ("statistics", "output_statistics")
RESUMED = [
    (signal.SIGKILL, INPUTS, [("statistics", *where) for where in ((2, 1), (3, 0), (3, 1))]),
    pytest.param(signal.SIGTERM, BOTH, [("output_statistics", 1, 0), ("output_statistics", 1, 1)]  # one is damaged
     + [(name, layer, index) for layer in (2, 3) for index in (0, 1) for name in STATISTICS], marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize("given, tokens, projections, noticed", [
    (None, 8 * 48, BOTH, False), (None, 8 * 48 - 1, INPUTS, False), ("inputs", 8 * 48, INPUTS, False),
    ("both", 8 * 48, BOTH, False), ("both", 8 * 48 - 1, BOTH, True),
])  # fmt: skip
def test_the_outputs_are_fitted_where_there_are_tokens_for_it(given, tokens, projections, noticed, caplog):
    """By default; of a model whose MLP has 48 features, which are more than those of its heads."""
    model = dataclasses.replace(standard().model, d_ff=48)
    options = dict.fromkeys(("residual", "ranks", "dtype", "ridge", "search", "tensor"))
    options |= dict(source="x", destination="out", to="checkpoint", ladder_layers="2", calibration=["a.txt"])
    request = convert.parse(options | dict(refit=given, calibration_tokens=tokens), model)
    assert request.refit == Refit(projections=projections)
    assert caplog.messages == noticed * [
        "notice: --refit both fits 48 features on 383 tokens; with fewer than 8 for each it may give back less than"
        " --refit inputs: --calibration-tokens 384"
    ]


@pytest.mark.parametrize("signum, projections, resumed", RESUMED)
def test_killed_and_resumed_bit_for_bit(signum, projections, resumed, small, texts, tmp_path, monkeypatch, capsys):
    """What was fitted is read, not fitted again; the result is that of an undisturbed run."""
    command = ["convert", str(small), str(tmp_path / "out"), "--ladder-layers", "3", "--refit", projections.value]
    command += ["--calibration", str(texts / "a.txt"), "--calibration-tokens", "128"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", KILLED, str(int(signum)), *command]
    done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), done.stderr
    assert signum == signal.SIGKILL or "the same command goes on from here" in done.stderr
    left = tmp_path / ".out.converting" / "chosen"
    assert len(list(left.glob("*.npz"))) == 3 and not (tmp_path / "out").exists()
    if signum == signal.SIGTERM:  # a damaged file is fitted again
        (left / "0001-attention-out.npz").write_bytes(b"nonsense")
    fitted = []
    for name in STATISTICS:
        method = getattr(Pass, name)
        recorded = lambda self, *where, name=name, method=method: (fitted.append((name, *where)), method(self, *where))[
            1
        ]
        monkeypatch.setattr(Pass, name, recorded)
    assert main(command) == 0
    assert fitted == resumed
    printed = capsys.readouterr().out
    assert "refitted 6 sublayers: the late inputs" in printed
    assert ("behind these inputs, the sublayers' outputs lacked" in printed) == (projections is BOTH)
    command[2] = str(tmp_path / "undisturbed")
    assert main(command) == 0
    first, second = (pretrained.open(tmp_path / name) for name in ("out", "undisturbed"))
    assert all((first.arrays[key].read() == stored.read()).all() for key, stored in second.arrays.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "undisturbed"]


def test_other_requests_resume_nothing(tmp_path):
    """What was kept of other tokens, or another ridge, is not read."""
    keep = dict(model=small_model("ladder"), mesh=parallel.make_mesh(), folder=tmp_path / "kept")
    changes = [dict(), dict(rows=TOKENS[::-1]), dict(settings=Refit(ridge=0.1))]
    for change in changes:
        kept = refit(standard(), **{"rows": TOKENS, **keep, **change})
        fresh = refit(standard(), **{"rows": TOKENS, **keep, **change, "folder": None})
        for key, stored in fresh.source.arrays.items():
            assert (stored.read() == kept.source.arrays[key].read()).all()


def test_mistakes_are_one_line(small, texts, tmp_path):
    text = str(texts / "a.txt")
    (tmp_path / "short.txt").write_text("the cat")
    command = ["convert", str(small), str(tmp_path / "out")]
    for arguments, said in (
        (["--calibration", text], "--calibration needs --ladder-layers"),
        (["--ladder-layers", "2", "--refit", "inputs"], "--refit needs a text: name one by --calibration FILE"),
        (["--ladder-layers", "2", "--ridge", "1"], "--ridge needs a text"),
        (["--ladder-layers", "2", "--calibration", text, "--refit", "none"], "--calibration is for --refit inputs"),
        (["--ladder-layers", "2", "--calibration", text, "--refit", "input"], "did you mean 'inputs'?"),
        (["--ladder-layers", "2", "--calibration", text, "--ridge", "0"], "must be a positive number, not 0"),
        (["--ladder-layers", "2", "--calibration", f"{text}:0"], "the weight must be positive, not 0"),
        (["--ladder-layers", "2", "--calibration", text, "--calibration-tokens", "31"], "model's width, 32; there"),
        (["--ladder-layers", "2", "--calibration", str(tmp_path / "short.txt")], "tokens; measuring needs at least"),
        (["--ladder-layers", "2", "--calibration", str(tmp_path)], "cannot read --calibration"),
    ):  # fmt: skip
        assert_refused([*command, *arguments], said)
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def assert_refused(command, said):
    parser = argparse.ArgumentParser()
    VERBS["convert"].declare(parser)
    with pytest.raises(UserError) as refusal:
        convert.run(vars(parser.parse_args(command[1:])))
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_models_that_cannot_be_refitted():
    settings = dict(rows=TOKENS, model=small_model("ladder"))
    ladder = dataclasses.replace(standard(), model=small_model("ladder"))
    with pytest.raises(UserError, match="starts from a standard model; .* is ladder"):
        refit(ladder, mesh=parallel.make_mesh(), **settings)
    with pytest.raises(UserError, match="is for ladder kinds of residual, whose inputs are late, not 'desync-2'"):
        refit(standard(), mesh=parallel.make_mesh(), rows=TOKENS, model=small_model("desync-2", ranks=2))
    with pytest.raises(UserError, match="splits parameters over fsdp"):
        refit(standard(), mesh=parallel.make_mesh(fsdp=2), **settings)
    infinite = (
        Key("layers/attention/out", 0),
        Stored((8, 4, 32), np.float32, lambda: np.full((8, 4, 32), np.inf, np.float32)),
    )
    broken = dataclasses.replace(standard(), arrays={**standard().arrays, infinite[0]: infinite[1]})
    with pytest.raises(RunFailed, match="no least squares: .*infs or NaNs"):
        refit(broken, mesh=parallel.make_mesh(), **settings)


def test_shares_of_several_texts(tmp_path):
    tokenizer = type("Tokenizer", (), {"encode": lambda self, text: [ord(letter) for letter in text]})()
    for name, letter in (("a.txt", "a"), ("b:2.txt", "b")):
        (tmp_path / name).write_text(letter * 5000)
    assert [parse_text(f"x{end}") for end in ("", ":2", ":y")] == [Text("x"), Text("x", 2.0), Text("x:y")]
    texts = [Text(str(tmp_path / "a.txt"), 3), Text(str(tmp_path / "b:2.txt"))]
    rows = rows_of(texts, tokenizer=tokenizer, tokens=4000, vocab_size=129, skip=800)
    assert rows.shape == (4, 1001) and [chr(row[0]) for row in rows] == ["a", "a", "a", "b"]
