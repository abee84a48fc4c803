"""Models with experts converted by measurement: sensitivities and the refit, against the dense loop in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import parallel
from ladder_jax.nn.parameter import stacks
from ladder_jax.pretrained.refit import Refit, refit
from ladder_jax.pretrained.sensitivity import Probe
from ladder_jax.pretrained.source import Key
from tests import cases, experts, reference
from tests.pretrained.test_refit import BOTH, INPUTS, RIDGE, WRITERS, as_source, hidden, stacked_least_squares

TOKENS = cases.tokens((5, 30), seed=4)
ATTENTION = ("query", "key", "value")
ROUTED = ("router", "experts/gate", "experts/up")
SHARED = ("shared/gate", "shared/up", "shared/share")


MLP = ("gate", "up")


def parameters(kind, dense=0):
    return cases.parameters(experts.define("standard", kind, dense_layers=dense))


def at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def expected(name, kind, *, dense=0, projections):
    """The fitted arrays, {(layer, array): values}, and how far float32 activations may move them.

    Written from the recurrence, every activation at once and in float64: attention reads x - late, experts a stream
    without attention's output. dense: so many first layers have an MLP in place of experts.
    """
    shape = experts.shape(name, experts.model(name, kind, dense_layers=dense))
    original = jax.tree.map(lambda a: np.asarray(a, np.float64), parameters(kind, dense))
    params, found, amplified = jax.tree.map(np.copy, original), {}, 0.0
    norm = lambda x: (x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.eps)).reshape(-1, x.shape[-1])

    def of_layer(params, l):
        stack, place = ("dense", l) if l < dense else ("layers", l - dense)
        return jax.tree.map(lambda a: a[place], params[stack])  # views

    def fit(l, sublayer, late, whole):
        nonlocal amplified
        matrix, factor = stacked_least_squares(norm(late), norm(whole))
        amplified, p = max(amplified, factor), of_layer(params, l)
        scale = p[f"{sublayer}_norm"]["scale"]
        of_mlp = MLP if l < dense else (*ROUTED, *(SHARED if "shared" in p["mlp"] else ()))
        for path in ATTENTION if sublayer == "attention" else of_mlp:
            if path == "shared/share" and "share" not in p["mlp"]["shared"]:
                continue
            weight = at(p[sublayer], path)
            of = "ij,ejm->eim" if path.startswith("experts") else "ij,j...->i..."
            found[l, f"{sublayer}/{path}"] = weight[...] = np.einsum(of, matrix * scale[None], weight)
        scale[:] = 1.0

    def fit_out(l, sublayer, function, late, whole):
        """The output projection, to what the sublayer gave of the whole input."""
        nonlocal amplified
        output = lambda p, x: call(function, p[sublayer], x, p[f"{sublayer}_norm"]["scale"])
        p, array = of_layer(params, l), WRITERS[sublayer]
        alone = jax.tree.map(lambda a: a[None], p)
        read = hidden(alone, 0, sublayer, lambda these: output(jax.tree.map(lambda a: a[0], these), late))
        lacking = output(of_layer(original, l), whole) - output(p, late)
        change, factor = stacked_least_squares(read, lacking.reshape(len(read), -1), prior=0)
        amplified = max(amplified, factor)
        p[sublayer][array] += change.reshape(p[sublayer][array].shape)
        found[l, f"{sublayer}/{array}"] = p[sublayer][array].copy()

    def call(function, p, x, scale):
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            normed = reference.rms(jnp.asarray(x), scale, shape.eps)[None]
            return np.asarray(function(jax.tree.map(jnp.asarray, p), normed, shape))[0]

    x, late = params["embedding"]["table"][TOKENS], None
    for l in range(shape.layers):
        ladder = shape.ladder is None or l in shape.ladder
        p, both = of_layer(params, l), projections is BOTH
        reads_late = ladder and late is not None
        if reads_late:
            fit(l, "attention", x - late, x)
            if both:
                fit_out(l, "attention", reference.attention, x - late, x)
        a = call(reference.attention, p["attention"], x - late if reads_late else x, p["attention_norm"]["scale"])
        if ladder:
            fit(l, "mlp", x, x + a)
            if both and l < dense:
                fit_out(l, "mlp", reference.mlp, x, x + a)
        of_experts, scale = x if ladder else x + a, p["mlp_norm"]["scale"]
        if l < dense:
            m = call(reference.mlp, p["mlp"], of_experts, scale)
            x, late = x + a + m, None if shape.kind == "farskip" else m  # which leaves nothing pending
            continue
        routed = call(reference.routed, p["mlp"], of_experts, scale)
        shared = call(reference.shared, p["mlp"], of_experts, scale) if "shared" in p["mlp"] else 0.0
        x = x + a + routed + shared
        late = routed if ladder and shape.kind == "farskip" else routed + shared
    return found, amplified


FULL = pytest.mark.full
ROWS = [
    ("farskip", "shared", 1, dict(tensor=4), BOTH),
    pytest.param("farskip", "shared", 0, dict(tensor=4), BOTH, marks=FULL),
    pytest.param("hybrid-farskip", "ungated", 0, dict(data=2), INPUTS, marks=FULL),
    pytest.param("farskip-first", "shared", 0, dict(tensor=2), INPUTS, marks=FULL),
    pytest.param("farskip", "shared", 2, dict(tensor=8), BOTH, marks=FULL),
    pytest.param("ladder", "shared", 0, dict(), BOTH, marks=FULL),
    pytest.param("ladder", "routed", 2, dict(tensor=2), BOTH, marks=FULL),
    pytest.param("hybrid-ladder", "routed", 0, dict(tensor=2), INPUTS, marks=FULL),
    pytest.param("hybrid-ladder", "routed", 1, dict(data=2), INPUTS, marks=FULL),
]


@pytest.mark.parametrize("name, kind, dense, mesh, projections", ROWS)
def test_the_refit_is_the_least_squares_solution(name, kind, dense, mesh, projections):
    """Router, every expert and the shared one, in the experts' and in the layers' order; nothing else is touched.

    Of output projections attention's, and those of first layers without experts.
    """
    model = experts.model(name, kind, dense_layers=dense)
    source = as_source(parameters(kind, dense), dataclasses.replace(model, residual="standard", ladder_layers=None))
    settings = dict(mesh=parallel.make_mesh(**mesh), settings=Refit(ridge=RIDGE, projections=projections))
    result = refit(source, model=model, rows=TOKENS, **settings)
    wanted, amplified = expected(name, kind, dense=dense, projections=projections)
    assert len(wanted) > 3 and all(f.after < f.before for f in result.fits)
    inputs = [f for f in result.fits if f.sublayer in ("attention", "mlp")]
    assert {(f.layer, f.sublayer) for f in inputs} == {(l, array.split("/")[0]) for l, array in wanted}
    outputs = {(l, array) for l, array in wanted if array in ("attention/out", "mlp/down")}
    assert {(f.layer, f.sublayer) for f in result.fits if f not in inputs} == outputs
    assert len(result.fits) == len(inputs) + len(outputs)
    key = lambda l, array: Key(f"dense/{array}", l) if l < dense else Key(f"layers/{array}", l - dense)
    for (layer, array), values in wanted.items():
        actual = result.source.arrays[key(layer, array)].read()
        assert actual.dtype == np.float32
        assert cases.error(actual, values) <= amplified * cases.bound(model), (layer, array)
    touched = {key(*array) for array in wanted}
    touched |= {key(fit.layer, f"{fit.sublayer}_norm/scale") for fit in inputs}
    changed = {key for key, stored in source.arrays.items() if result.source.arrays[key] is not stored}
    assert changed == touched


SUBSETS = [
    ("farskip", "shared", 1, 2),
    pytest.param("farskip", "shared", 0, 2, marks=FULL),
    pytest.param("farskip", "ungated", 2, 4, marks=FULL),
    pytest.param("ladder", "routed", 0, 1, marks=FULL),
    pytest.param("ladder-2", "routed", 1, 2, marks=FULL),
]


@pytest.mark.parametrize("name, kind, dense, tensor", SUBSETS)
def test_losses_of_any_subset_are_the_references(name, kind, dense, tensor):
    definition = experts.define(name, kind, tensor=tensor, dense_layers=dense)
    params = cases.parameters(definition)
    rows = cases.tokens((2, 17), seed=3)
    placed = cases.place(params, definition)
    unstacked = {
        stack: [jax.tree.map(lambda a: a[n], placed[stack]) for n in range(len(of))]
        for stack, of in stacks(definition.config).items()
    }
    probe = Probe(definition, placed | unstacked, rows)
    plain = parameters(kind, dense)
    shape = experts.shape(name, definition.config)
    for chosen in ((), (0, 1), (2,), (0, 2)):
        told = dataclasses.replace(shape, ladder=chosen)
        assert probe.loss(chosen) == pytest.approx(reference.loss_eagerly(plain, rows, told), rel=2e-5), chosen
