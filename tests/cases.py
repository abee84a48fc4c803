"""What the numerical tests share: every topology, a small model, random parameters, float32
bounds.
"""

import dataclasses
import functools

import jax
import numpy as np

from ladder_jax import decode, nn, parallel, train
from ladder_jax.config import Dtype, Loop, ModelConfig, Quantize
from ladder_jax.decode import weights
from tests import one_step, reference

# name of the test: (model.residual, model.ladder_layers, the reference's kind, number and layers)
TOPOLOGIES = {
    "standard": ("standard", None, "standard", 1, None),
    "ladder": ("ladder", None, "ladder", 1, None),
    "ladder-2": ("ladder-2", None, "ladder", 2, None),
    "ladder-3": ("ladder-3", None, "ladder", 3, None),
    "ladder-fresh": ("ladder-fresh", None, "fresh", 1, None),
    "parallel": ("parallel", None, "parallel", 1, None),
    "parallel-shared-norm": ("parallel-shared-norm", None, "parallel", 1, None),
    "parallel-ladder": ("parallel-ladder", None, "parallel-ladder", 1, None),
    "desync-2": ("desync-2", None, "desync", 2, None),
    "desync-3": ("desync-3", None, "desync", 3, None),
    "no-communication": ("no-communication", None, "none", 1, None),
    "hybrid-last-2": ("ladder", "2", "ladder", 1, (2, 3)),
    "hybrid-list": ("ladder", "0,2", "ladder", 1, (0, 2)),
    "hybrid-delay-2": ("ladder-2", "2", "ladder", 2, (2, 3)),
    "hybrid-delay-3-first": ("ladder-3", "0,1", "ladder", 3, (0, 1)),
    "hybrid-fresh": ("ladder-fresh", "1,3", "fresh", 1, (1, 3)),
    "hybrid-parallel-ladder": ("parallel-ladder", "2", "parallel-ladder", 1, (2, 3)),
}
DEPEND_ON_RANKS = [name for name, case in TOPOLOGIES.items() if case[2] in ("fresh", "desync")]

# One of each recurrence: what is saved, recomputed and carried depends on that.
RECURRENCES = (
    "standard",
    "ladder",
    "ladder-2",
    "ladder-fresh",
    "parallel-ladder",
    "desync-2",
    "hybrid-delay-2",
)
OTHERS = [name for name in TOPOLOGIES if name not in RECURRENCES]


def model(name="standard", **changes):
    """Four small layers in float32: 8 heads, 4 key/value heads, and a vocabulary that nothing
    divides.
    """
    residual, ladder_layers, *_ = TOPOLOGIES[name]
    settings = dict(
        num_layers=4,
        d_model=32,
        num_heads=8,
        num_kv_heads=4,
        d_ff=48,
        vocab_size=251,
        dtype=Dtype.FLOAT32,
        residual_dtype=Dtype.FLOAT32,
        residual=residual,
        ladder_layers=ladder_layers,
    )
    return ModelConfig(**{**settings, **changes})


def shape(name, config, *, ranks):
    _, _, kind, number, ladder = TOPOLOGIES[name]
    scaling = config.rope_scaling
    return reference.Shape(
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocab=config.vocab_size,
        kind=kind,
        number=number,
        ladder=ladder,
        # Where the function does not depend on them, the reference computes on one rank.
        ranks=ranks if _depends_on_ranks(name) else 1,
        theta=config.rope_theta,
        eps=config.norm_eps,
        llama3=None
        if scaling is None
        else (
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_context,
        ),
    )


def parameters(definition, *, seed=0):
    """Random values large enough that every sublayer moves the logits: NumPy, by stored names."""
    rng = np.random.default_rng(seed)

    def value(path, leaf, dims):
        kind = dims.removeprefix("L")
        fan_in = (reference.SUMMED | {"DC": (0,)}).get(kind)
        sizes = leaf.shape[len(dims) - len(kind) :]
        mean = 0
        scale = 0.3
        if path[-1].key == "share":  # around 1 the gate is open, and has hardly a gradient
            scale = 0.2
        elif kind in ("D", "H") or path[-1].key == "scale":
            mean = 1
            scale = 0.2
        elif fan_in:
            scale = 1.3 / np.sqrt(np.prod([sizes[i] for i in fan_in]))
        real = list(leaf.shape)  # drawn without the padding, which depends on the mesh
        if kind == "VD":
            real[0] = definition.config.vocab_size
        elif kind.startswith("E"):
            real[1] = definition.config.moe.experts
        drawn = (mean + scale * rng.standard_normal(real)).astype(np.float32)
        return np.pad(drawn, [(0, n - m) for n, m in zip(leaf.shape, real)])

    return jax.tree.map_with_path(value, definition.abstract, definition.dims)


def tokens(shape_BT=(4, 10), *, vocab=251, seed=1):
    return np.random.default_rng(seed).integers(0, vocab, shape_BT).astype(np.int32)


def define(name, *, data=1, fsdp=1, tensor=1, ranks=None, **changes):
    """A definition on data x fsdp x tensor devices; `ranks` emulates that many on one."""
    config = model(name, **changes)
    if name in DEPEND_ON_RANKS:
        config = dataclasses.replace(config, ranks=ranks or tensor)
    return nn.define(config, mesh=parallel.make_mesh(data=data, fsdp=fsdp, tensor=tensor))


def place(params, definition):
    """`params` where a definition, or a plan of what trains, has them."""
    return jax.device_put(params, jax.tree.map(lambda a: a.sharding, definition.abstract))


def placed(definition):
    """`parameters`, on the definition's mesh."""
    return place(parameters(definition), definition)


def dense_logits(name, ranks, **changes):
    """What the reference computes of `parameters` and `tokens` of the small model, with these
    `changes`, on that many ranks.
    """
    return _dense(reference.logits, name, ranks if _depends_on_ranks(name) else 1, **changes)


def dense_gradients(name, ranks, *, function=reference.loss, **changes):
    """(loss, gradients), likewise."""
    return _dense(function, name, ranks if _depends_on_ranks(name) else 1, **changes)


def _depends_on_ranks(name):
    return TOPOLOGIES[name][2] in ("fresh", "desync", "none")


@functools.cache
def _dense(function, name, ranks, shape_BT=(4, 10), **changes):
    definition = define(name, tensor=ranks, **changes)
    of = shape(name, definition.config, ranks=ranks)
    batch = tokens(shape_BT)
    gradient = function is not reference.logits
    return reference.evaluate(function, parameters(definition), batch, of, gradient=gradient)


UNIT_ROUNDOFF = 2.0**-24  # of float32


def bound(config, *, passes=1):
    """The relative error that float32 rounding may cause, against the largest value.

    A sum of n rounded terms errs by about sqrt(n) unit roundoffs (Higham & Mary 2019, probabilistic
    analysis), n at most the longest contraction; errors of the 2L sublayers, the embedding's and
    the head's add up, each through a norm, a matmul, an activation or softmax, and a matmul: 4
    roundings
    of that kind. A backward pass doubles the chain (`passes=2`).
    """
    longest = max(config.d_model, config.d_ff, config.num_heads * config.head_dim)
    return passes * 4 * (2 * config.num_layers + 2) * longest**0.5 * UNIT_ROUNDOFF


def error(actual, expected):
    """The largest deviation, relative to the largest value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def error_but_for_padding(actual, expected):
    """`error` of two arrays, which may be padded for different meshes; padding must be zero."""
    arrays = np.asarray(actual), np.asarray(expected)
    both = tuple(slice(min(sizes)) for sizes in zip(*(a.shape for a in arrays), strict=True))
    assert all(np.count_nonzero(a) == np.count_nonzero(a[both]) for a in arrays)
    return error(*(a[both] for a in arrays))


def assert_close(found, expected, *, definition, passes=2):
    """(loss, gradients) are the expected ones, to float32's rounding."""
    limit = bound(definition.config, passes=passes)
    assert error(found[0], expected[0]) < limit
    errors = jax.tree.map(error_but_for_padding, found[1], expected[1])
    assert max(jax.tree.leaves(errors)) < limit, errors


def check_gradients(definition, expected, *, shape_BT=(4, 10), **settings):
    """Of `parameters` and `tokens`, loss and gradients are the expected ones, float32 and placed as
    the parameters. The program's text.
    """
    arguments = placed(definition), tokens(shape_BT)
    compute = train.loss_and_gradients(definition, **settings)
    program = jax.jit(compute).lower(*arguments).compile()
    loss, gradients = program(*arguments)
    assert_close((loss, gradients), expected, definition=definition)
    for array, like in zip(jax.tree.leaves(gradients), jax.tree.leaves(definition.abstract)):
        assert array.dtype == np.float32
        assert array.sharding.is_equivalent_to(like.sharding, array.ndim)
    return program.as_text()


def check_case(
    name,
    form,
    *,
    shape_BT=(4, 10),
    function=reference.loss,
    **settings,
):
    """`check_gradients` of a topology against the reference's. form: a mesh, or the ranks that one
    device emulates; and changes of the model.
    """
    definition = define(name, **form)
    changes = {key: form[key] for key in form.keys() - {"data", "fsdp", "tensor", "ranks"}}
    of = dict(function=function, shape_BT=shape_BT, **changes)
    expected = dense_gradients(name, definition.layout.ranks, **of)
    return check_gradients(definition, expected, shape_BT=shape_BT, **settings)


def prefilled(
    definition,
    tokens,
    lengths,
    *,
    loop=Loop.SCAN,
    quantize=Quantize.NONE,
    **form,
):
    """[logits [B, vocabulary], *the caches' arrays] of `parameters`, by a prefill of this form."""
    settings = dict(loop=loop, quantize=quantize)
    stored = weights.prepare(definition, placed(definition), **settings)
    program = decode.prefill(definition, capacity=32, **settings, **form)
    logits, caches = program(stored, tokens, np.asarray(lengths, np.int32))
    real = np.asarray(logits)[:, : definition.config.vocab_size]
    return [real, *map(np.asarray, jax.tree.leaves(caches))]


def programs(definition, **form):
    """(prefill, one decode step)."""
    return decode.prefill(definition, capacity=32, **form), one_step.decode(definition, **form)


def with_rubbish(tokens, lengths):
    """Prompts of these lengths, with other tokens beyond their ends."""
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 99)


def prefill_and_decode(programs, lengths, shape_BT, *, new):
    """A function of weights to trace: the logits after prompts of these lengths of `tokens`, and
    after each of `new` more.
    """
    prefill, step = programs
    drawn = tokens(shape_BT)
    after = lengths + np.arange(new)[:, None]

    def logits(stored):
        first, caches = prefill(stored, with_rubbish(drawn, lengths), lengths)
        one = lambda caches, inputs: step(stored, caches, *inputs)[::-1]
        return first, jax.lax.scan(one, caches, (drawn[np.arange(len(drawn)), after], after))[1]

    return logits


def check_logits(found, lengths, full, *, limit):
    """`prefill_and_decode`'s are those of the `full` pass [B, T, V]."""
    for more, logits in enumerate([found[0], *found[1]]):
        real, padding = np.split(np.asarray(logits), [full.shape[2]], axis=1)
        assert error(real, full[np.arange(len(full)), lengths + more - 1]) < limit
        assert np.isneginf(padding).all()


def check_prefill_and_decode(programs, stored, lengths, full, *, new, limit):
    """`check_logits`, of one program."""
    logits = prefill_and_decode(programs, lengths, full.shape[:2], new=new)
    check_logits(jax.jit(logits)(stored), lengths, full, limit=limit)


def on_mesh(name, data, tensor):
    """(definition, the reference's logits); one device has four emulated ranks, where it matters."""
    emulated = data == tensor == 1 and name in DEPEND_ON_RANKS
    definition = define(name, data=data, tensor=tensor, ranks=4 if emulated else None)
    return definition, dense_logits(name, 4 if emulated else tensor)


def flip(path):
    """One bit in the middle of a file, or of the largest one below a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
