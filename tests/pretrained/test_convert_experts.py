"""Models with experts converted by measurement: sensitivities and the refit, against the dense loop in float64."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import checkpoint, nn, parallel, pretrained
from ladder_jax.cli import main
from ladder_jax.pretrained.convert import native
from ladder_jax.pretrained.refit import Refit, refit
from ladder_jax.pretrained.sensitivity.measure import Probe
from ladder_jax.pretrained.source import Key
from tests import cases, experts, reference
from tests.pretrained.test_refit import BOTH, INPUTS, RIDGE, as_source, hidden, stacked_least_squares

TOKENS = cases.tokens((5, 30), seed=4)
ATTENTION = ("query", "key", "value")
ROUTED = ("router", "experts/gate", "experts/up")
SHARED = ("shared/gate", "shared/up", "shared/share")


def parameters(kind):
    return cases.parameters(experts.define("standard", kind))


def at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def expected(name, kind, *, projections):
    """The fitted arrays, {(layer, array): values}, and how far float32 activations may move them.

    Written from the recurrence, every activation at once and in float64: attention reads x - late, experts a stream
    without attention's output.
    """
    shape = experts.shape(name, experts.model(name, kind))
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters(kind))
    layers, found, amplified = jax.tree.map(np.copy, params["layers"]), {}, 0.0
    norm = lambda x: (x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.eps)).reshape(-1, x.shape[-1])

    def fit(l, sublayer, late, whole):
        nonlocal amplified
        matrix, factor = stacked_least_squares(norm(late), norm(whole))
        amplified = max(amplified, factor)
        scale = layers[f"{sublayer}_norm"]["scale"][l]
        arrays = ATTENTION if sublayer == "attention" else (*ROUTED, *(SHARED if "shared" in layers["mlp"] else ()))
        for path in arrays:
            if path == "shared/share" and "share" not in layers["mlp"]["shared"]:
                continue
            weight = at(layers[sublayer], path)[l]
            of = "ij,ejm->eim" if path.startswith("experts") else "ij,j...->i..."
            found[l, f"{sublayer}/{path}"] = weight[...] = np.einsum(of, matrix * scale[None], weight)
        scale[:] = 1.0

    def fit_out(l, late, whole):
        """Attention's output projection, to what attention gave of the whole input."""
        nonlocal amplified
        of_layer = lambda layers: (
            jax.tree.map(lambda a: a[l], layers[name]) for name in ("attention", "attention_norm")
        )

        def attention(layers, x):
            p, norm = of_layer(layers)
            return call(reference.attention, p, x, norm["scale"])

        read = hidden(layers, l, "attention", lambda these: attention(these, late))
        lacking = attention(params["layers"], whole) - attention(layers, late)
        change, factor = stacked_least_squares(read, lacking.reshape(len(read), -1), prior=0)
        amplified = max(amplified, factor)
        weight = layers["attention"]["out"][l]
        weight += change.reshape(weight.shape)
        found[l, "attention/out"] = weight.copy()

    def call(function, p, x, scale):
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            normed = reference.rms(jnp.asarray(x), scale, shape.eps)[None]
            return np.asarray(function(jax.tree.map(jnp.asarray, p), normed, shape))[0]

    x, late = params["embedding"]["table"][TOKENS], None
    for l in range(shape.layers):
        ladder = shape.ladder is None or l in shape.ladder
        p = jax.tree.map(lambda a: a[l], layers)  # views
        if ladder and late is not None:
            fit(l, "attention", x - late, x)
            if projections is BOTH:
                fit_out(l, x - late, x)
        scale = p["attention_norm"]["scale"]
        a = call(reference.attention, p["attention"], x - late if ladder and l else x, scale)
        if ladder:
            fit(l, "mlp", x, x + a)
        of_experts, scale = x if ladder else x + a, p["mlp_norm"]["scale"]
        routed = call(reference.routed, p["mlp"], of_experts, scale)
        shared = call(reference.shared, p["mlp"], of_experts, scale) if "shared" in p["mlp"] else 0.0
        x = x + a + routed + shared
        late = routed if ladder and shape.kind == "farskip" else routed + shared
    return found, amplified


FULL = pytest.mark.full
ROWS = [
    ("farskip", "shared", dict(tensor=4), BOTH),
    pytest.param("hybrid-farskip", "ungated", dict(data=2), INPUTS, marks=FULL),
    pytest.param("farskip-first", "shared", dict(tensor=2), INPUTS, marks=FULL),
    pytest.param("ladder", "shared", dict(), BOTH, marks=FULL),
    pytest.param("hybrid-ladder", "routed", dict(tensor=2), INPUTS, marks=FULL),
]


@pytest.mark.parametrize("name, kind, mesh, projections", ROWS)
def test_the_refit_is_the_least_squares_solution(name, kind, mesh, projections):
    """Router, every expert and the shared one, in the experts' and in the layers' order; nothing else is touched.

    Of output projections attention's alone.
    """
    model, source = experts.model(name, kind), as_source(parameters(kind), experts.model("standard", kind))
    settings = dict(mesh=parallel.make_mesh(**mesh), settings=Refit(ridge=RIDGE, projections=projections))
    result = refit(source, model=model, rows=TOKENS, **settings)
    wanted, amplified = expected(name, kind, projections=projections)
    assert len(wanted) > 3 and all(f.after < f.before for f in result.fits)
    inputs = [f for f in result.fits if f.sublayer in ("attention", "mlp")]
    assert {(f.layer, f.sublayer) for f in inputs} == {(l, array.split("/")[0]) for l, array in wanted}
    assert len(result.fits) == len(inputs) + sum(array == "attention/out" for _, array in wanted)
    for (layer, array), values in wanted.items():
        actual = result.source.arrays[Key(f"layers/{array}", layer)].read()
        assert actual.dtype == np.float32
        assert cases.error(actual, values) <= amplified * cases.bound(model), (layer, array)
    touched = {Key(f"layers/{array}", layer) for layer, array in wanted}
    touched |= {Key(f"layers/{fit.sublayer}_norm/scale", fit.layer) for fit in inputs}
    changed = {key for key, stored in source.arrays.items() if result.source.arrays[key] is not stored}
    assert changed == touched


@pytest.mark.parametrize(
    "name, kind, tensor", [("farskip", "shared", 2), pytest.param("ladder", "routed", 1, marks=FULL)]
)
def test_losses_of_any_subset_are_the_references(name, kind, tensor):
    definition = experts.define(name, kind, tensor=tensor)
    params = cases.parameters(definition)
    rows = cases.tokens((2, 17), seed=3)
    probe = Probe(definition, cases.place(params, definition), rows, on_loss=lambda: None)
    plain = parameters(kind)
    shape = experts.shape(name, definition.config)
    for chosen in ((0, 1), (2,)):
        told = dataclasses.replace(shape, ladder=chosen)
        assert probe.loss(chosen) == pytest.approx(reference.loss_eagerly(plain, rows, told), rel=2e-5), chosen


@pytest.mark.full
def test_the_verb_chooses_and_refits(tmp_path, capsys):
    """A byte-level model: one of three layers as FarSkip, by what it costs refitted; it opens as what was said."""
    model = experts.model("standard", "shared", vocab_size=256)
    definition = nn.define(model, mesh=parallel.make_mesh())
    place = tmp_path / "standard"
    native.write(as_source(cases.parameters(definition), model), place, definition=definition, place=place)
    (tmp_path / "text.txt").write_text("the thin cat sat there then, with that other thing; " * 40)
    choice = ["--ladder-layers", "auto:1", "--residual", "farskip", "--calibration", str(tmp_path / "text.txt")]
    command = ["convert", str(place), str(tmp_path / "out"), *choice, "--calibration-tokens", "256", "--tensor", "2"]
    assert main(command) == 0
    assert "the late inputs lacked" in capsys.readouterr().out
    told = json.loads((tmp_path / "out" / "sensitivity.json").read_text())
    layer = told[told["chosen"]]["layers"][0]
    saved = checkpoint.open_checkpoint(tmp_path / "out")
    assert (saved.config.model.residual, saved.config.model.ladder_layers) == ("farskip", f"{layer},")
    fits = json.loads((tmp_path / "out" / "refit.json").read_text())["sublayers"]
    assert {fit["layer"] for fit in fits} == {layer} and all(fit["after"] < fit["before"] for fit in fits)
    before, after = pretrained.open(place), pretrained.open(tmp_path / "out")
    key = Key("layers/mlp/router", layer)
    assert (before.arrays[key].read() != after.arrays[key].read()).any()
