"""The refit's independent reference: in float64, with every activation there at once."""

import functools
from dataclasses import replace

import jax
import numpy as np
from flax import traverse_util

from ladder_jax import parallel
from ladder_jax.nn.parameter import STACKS
from ladder_jax.pretrained.refit import FittedProjections, Refit, refit
from ladder_jax.pretrained.source import Key, Source, Stored
from tests import cases, reference

RIDGE = 1e-2
CONDITION = 30  # of a fit: by it a rounding of activations enters M
TOKENS = cases.tokens((6, 30), seed=4)
SUBLAYERS = ("attention", "mlp")
EXPERTS = ("router", "experts/gate", "experts/up", "shared/gate", "shared/up", "shared/share")
READERS = {"attention": ("query", "key", "value"), "mlp": ("gate", "up", *EXPERTS)}
WRITERS = {"attention": "out", "mlp": "down"}


def as_source(params, model):
    """In memory, as no file has it."""
    arrays = {}
    for name, stack in traverse_util.flatten_dict(params, sep="/").items():
        if name.partition("/")[0] in STACKS:
            arrays |= {Key(name, layer): array for layer, array in enumerate(stack)}
        else:
            arrays[Key(name)] = stack[: model.vocab_size] if name.endswith("table") else stack
    stored = lambda array: Stored(array.shape, array.dtype, lambda: array)
    return Source("in memory", model, {key: stored(array) for key, array in arrays.items()})


def check(params, model, shape, *, projections, **mesh):
    """The fitted arrays of `params` are the wanted ones, gains became ones, and nothing else is
    touched.
    """
    standard = replace(model, residual="standard", ladder_layers=None, ranks=None)
    source = as_source(params, standard)
    settings = Refit(ridge=RIDGE, projections=projections)
    mesh = parallel.make_mesh(**mesh)
    result = refit(source, model=model, rows=TOKENS, mesh=mesh, settings=settings)
    wanted = expected(params, shape, both=projections is FittedProjections.BOTH)
    key = lambda layer, array: Key.of_layer(layer, array, model=model)
    sublayer = lambda array: (
        array if array in ("attention/out", "mlp/down") else array.partition("/")[0]
    )
    fits = {(fit.layer, fit.sublayer) for fit in result.fits}
    assert fits == {(layer, sublayer(array)) for layer, array in wanted}
    assert len(fits) == len(result.fits)
    limit = CONDITION * cases.bound(model)
    assert all(fit.after < fit.before for fit in result.fits)
    for (layer, array), values in wanted.items():
        actual = result.source.arrays[key(layer, array)].read()
        assert actual.dtype == np.float32
        assert cases.error(actual, values) <= limit, (layer, array)
    gains = {key(layer, f"{name}_norm/scale") for layer, name in fits if name in SUBLAYERS}
    assert all((result.source.arrays[gain].read() == 1).all() for gain in gains)
    changed = {
        key for key, stored in source.arrays.items() if result.source.arrays[key] is not stored
    }
    assert changed == gains | {key(*array) for array in wanted}


def expected(params, shape, *, both=False):
    """The fitted arrays, {(layer, array): values}. Each M is the solution of one stacked
    least-squares problem.
    """
    original = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    fitted = jax.tree.map(np.copy, original)
    found = {}
    dense = len(params["dense"]["attention_norm"]["scale"]) if "dense" in params else 0
    farskip = shape.kind == "farskip"
    delays = (2, 3) if shape.kind == "parallel-ladder" else (shape.number,) * 2
    kind = "farskip" if farskip else ""
    alone = replace(shape, layers=0, vocab=0, kind=kind, number=1, ladder=None)
    alone_dense = replace(alone, kind="", experts=None)

    # early: what a farskip's last experts gave that their successor does not leave out
    xs = [original["embedding"]["table"][TOKENS]]
    newest = None
    early = 0.0
    for i in range(1, 2 * shape.layers + 1):
        layer, index = divmod(i - 1, 2)
        sublayer = SUBLAYERS[index]
        stack, place = ("dense", layer) if layer < dense else ("layers", layer - dense)
        layers = fitted[stack]
        own = layers[sublayer]
        before = original[stack][sublayer]
        chosen = shape.ladder is None or layer in shape.ladder
        behind_dense = farskip and index == 0 and layer <= dense  # which leaves nothing pending
        delay = min(delays[index], i - 1) if chosen and not behind_dense else 0
        whole = np.stack([xs[i - 1]] * shape.ranks)
        inputs = np.stack([xs[i - 1 - delay]] * shape.ranks)
        if delay and shape.kind == "fresh":
            inputs = inputs + newest
        elif delay and index == 0:
            inputs = inputs + early

        if delay:
            gain = layers[f"{sublayer}_norm"]["scale"]
            for array, weights in traverse_util.flatten_dict(before, sep="/").items():
                if array in READERS[sublayer]:
                    fit = fit_of_experts if array.startswith("experts/") else fit_by_ranks
                    values = fit(weights[place], gain[place], shape.eps, inputs, xs[i - 1])
                    at(own, array)[place] = found[layer, f"{sublayer}/{array}"] = values
            gain[place] = 1.0

        about = alone if layer >= dense else alone_dense
        # each rank's partial sum [R, B, T, D] in float64
        parts = functools.partial(reference.sublayer, l=place, attends=index == 0, shape=about)
        # farskip's experts are two parts
        output = lambda params, x: parts(params, inputs=x).reshape(-1, *x.shape).sum(0)
        newest = output(layers, inputs)
        writes = WRITERS[sublayer]
        if delay and both and writes in own:
            lacking = (output(original[stack], whole) - newest).sum(0)
            read = hidden(layers, sublayer, lambda these: parts(these, inputs=inputs).sum(0))
            change = stacked_least_squares(read, lacking.reshape(len(read), -1), prior=0)
            own[writes][place] += change.reshape(own[writes][place].shape)
            found[layer, f"{sublayer}/{writes}"] = own[writes][place].copy()
            newest = output(layers, inputs)
        if index == 1:
            early = (
                parts(layers, inputs=inputs)[1].sum(0)
                if farskip and chosen and layer >= dense
                else 0.0
            )
        xs.append(xs[-1] + newest.sum(0))
    return found


def normalised(x, eps):
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x.reshape(-1, x.shape[-1])


def fit_by_ranks(weight, gain, eps, inputs, whole):
    """A projection [D, ...] of each rank's own input; where several ranks share a part of it, they
    share its fit.
    """
    parts = min((len(inputs), *weight.shape[1:2]))
    split = np.split(weight, parts, axis=1) if parts > 1 else [weight]
    columns = []
    for part, group in zip(split, np.split(inputs, parts)):
        late = np.concatenate([normalised(x, eps) for x in group])
        same = np.concatenate([normalised(whole, eps)] * len(group))
        columns.append(np.tensordot(stacked_least_squares(late, same) * gain[None], part, 1))
    return columns[0] if parts == 1 else np.concatenate(columns, axis=1)


def fit_of_experts(weight, gain, eps, inputs, whole):
    """Every expert's [D, M], of one input."""
    matrix = stacked_least_squares(normalised(inputs[0], eps), normalised(whole, eps))
    return np.einsum("ij,ejm->eim", matrix * gain[None], weight)


def at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


def hidden(layers, sublayer, output):
    """What the output projection reads, [n, M]: its output where it copies that, without bias."""
    writes = WRITERS[sublayer]
    own = {name: array for name, array in layers[sublayer].items() if name != f"{writes}_bias"}
    shape = own[writes].shape[:-1]
    count = int(np.prod(shape[1:]))
    own[writes] = np.broadcast_to(np.eye(count).reshape(*shape[1:], count), (*shape, count))
    return output({**layers, sublayer: own}).reshape(-1, count)


def stacked_least_squares(late, whole, *, prior=1):
    """argmin |late M - whole|^2 + l |M - prior|^2."""
    width = late.shape[1]
    penalty = np.sqrt(RIDGE * np.sum(late * late) / width)
    rows = np.concatenate([late, penalty * np.eye(width)])
    targets = np.concatenate([whole, prior * penalty * np.eye(width, whole.shape[1])])
    return np.linalg.lstsq(rows, targets)[0]
