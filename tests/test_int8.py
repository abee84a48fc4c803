"""Weights of 8 bits: the numbers, what each matmul loses, and every model against its dense int8
reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import decode
from ladder_jax.config import Biases, Dtype, Loop, Quantize
from ladder_jax.decode import steps, weights
from ladder_jax.nn import quantized
from ladder_jax.nn.quantized import Int8
from tests import cases, one_step, reference

INT8 = Quantize.INT8
LENGTHS = np.array([1, 4, 6, 3], np.int32)
OVER = {"DNH": (0,), "DKH": (0,), "NHD": (0, 1), "DF": (0,), "FD": (0,), "VD": (1,)}


def numbers(array, dims):
    """(whole numbers, scales with the summed dimensions as 1) of a matrix, again, in NumPy."""
    lead = dims.startswith("L")
    largest = np.abs(array).max(
        tuple(axis + lead for axis in OVER[dims.removeprefix("L")]), keepdims=True
    )
    scale = largest * np.float32(1 / 127)
    scale[scale == 0] = 1
    return np.rint(array / scale), scale


def dense(definition, params):
    """The parameters with every matrix replaced by what its 8 bits stand for, in float64."""

    def leaf(array, dims):
        if dims.removeprefix("L") not in OVER:
            return array
        values, scale = numbers(array, dims)
        return values * np.float64(scale)

    return jax.tree.map(leaf, params, definition.dims)


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dims", [*OVER, "LNHD"])
def test_numbers_are_the_nearest(dims):
    array = random((3, 4, 6, 5)[4 - len(dims) :])
    if dims == "VD":
        array[1] = 0
    made = jax.jit(functools.partial(Int8.of, dims=dims))(array)
    values, scale = numbers(array, dims)
    assert made.values.dtype == jnp.int8 and made.scale.dtype == jnp.float32
    np.testing.assert_array_equal(made.values, values)
    np.testing.assert_array_equal(
        made.scale, scale.squeeze(tuple(i for i, n in enumerate(scale.shape) if n == 1))
    )
    assert np.abs(values).max() == 127
    assert (np.abs(values * np.float64(scale) - array) <= scale * (0.5 + 1e-4)).all()
    assert made.values.ndim == len(Int8.dims(dims).values) and made.scale.ndim == len(
        Int8.dims(dims).scale
    )


def test_what_is_not_a_number_stays_visible():
    for bad in (np.nan, np.inf):
        array = random((4, 3))
        array[2, 1] = bad
        out = quantized.einsum("BTD,DF->BTF", jnp.ones((1, 1, 4)), Int8.of(array, "DF"))
        np.testing.assert_array_equal(np.isnan(out[0, 0]), [False, True, False])


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize(
    "spec, dims",
    [
        ("BTD,DNH->BTNH", "DNH"),
        ("BTD,DKH->BTKH", "DKH"),
        ("BTNH,NHD->BTD", "NHD"),
        ("BTD,DF->BTF", "DF"),
        ("BTF,FD->BTD", "FD"),
        ("BTD,VD->BTV", "VD"),
    ],
)
def test_a_matmul_loses_at_most_half_a_step_a_term(spec, dims, dtype):
    """|error| <= sum |x| scale / 2, and what the dtype rounds: the result once, and sums in
    float32.
    """
    sizes = dict(B=2, T=3, D=24, N=4, K=2, H=6, F=20, V=30)
    shape = lambda letters: tuple(sizes[letter] for letter in letters)
    inputs, output = spec.split(",")[0], spec.split("->")[1]
    x, weight = jnp.asarray(random(shape(inputs)), dtype.value), random(shape(dims), seed=1)
    out = jax.jit(lambda x, w: quantized.einsum(spec, x, Int8.of(w, dims)))(x, weight)
    assert out.dtype == dtype.value

    wide = np.asarray(x, np.float64)
    exact = np.einsum(spec, wide, weight.astype(np.float64))
    half_steps = np.einsum(
        spec, np.abs(wide), np.broadcast_to(np.float64(numbers(weight, dims)[1] / 2), weight.shape)
    )
    magnitudes = np.einsum(spec, np.abs(wide), np.abs(weight) + 2 * 2.0**-7)
    terms = np.prod([sizes[letter] for letter in inputs if letter not in output])
    unit = 2.0**-9 if dtype is Dtype.BFLOAT16 else cases.UNIT_ROUNDOFF
    rounding = 2 * unit * (np.abs(exact) + half_steps) + terms * cases.UNIT_ROUNDOFF * magnitudes
    errors = np.abs(np.asarray(out, np.float64) - exact)
    assert (errors <= half_steps * (1 + 1e-4) + rounding).all()
    assert errors.max() > half_steps.max() / 50, "nothing was quantised"


def test_a_looked_up_row_loses_at_most_half_a_step():
    table, indices = random((30, 8)), np.array([[3, 29], [0, 3]])
    rows = quantized.rows(Int8.of(table, "VD"), indices, dtype=jnp.float32)
    steps = numbers(table, "VD")[1][indices]
    assert (np.abs(rows - table[indices]) <= steps * (0.5 + 1e-4)).all()


def stored(definition, params, *, loop):
    return weights.prepare(definition, cases.place(params, definition), loop=loop, quantize=INT8)


def empty(definition, *, rows, loop):
    """Caches of nothing yet, so that decoding needs no prefill."""
    abstract = steps.abstract_cache(definition, rows=rows, capacity=8, loop=loop)
    return jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), abstract)


def stepped(definition, params, *, loop):
    """Logits [3, 4, 251] of three decode steps from the first position on."""
    params, caches = stored(definition, params, loop=loop), empty(definition, rows=4, loop=loop)
    step, found = one_step.decode(definition, loop=loop, quantize=INT8), []
    for position in range(3):
        logits, caches = step(
            params, caches, cases.tokens()[:, position], np.full(4, position, np.int32)
        )
        found.append(np.asarray(logits)[:, :251])
    return np.stack(found)


# Of the other recurrences the weights are those of one of these.
STORED = "ladder", "ladder-fresh", "parallel-ladder"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in STORED else pytest.mark.full)
        for name in cases.TOPOLOGIES
    ],
)
def test_every_topology_computes_with_the_numbers_as_they_are(name):
    """Against the reference on the dense matrices that the whole numbers stand for."""
    loop = list(Loop)[list(cases.TOPOLOGIES).index(name) % 2]
    definition = cases.define(name, tensor=4)
    params = cases.parameters(definition)
    shape = cases.shape(name, definition.config, ranks=4)
    full = reference.evaluate(reference.logits, dense(definition, params), cases.tokens(), shape)
    expected = full[:, :3].swapaxes(0, 1)
    assert cases.error(stepped(definition, params, loop=loop), expected) < 2 * cases.bound(
        definition.config
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(biases=Biases.QKV, loop=Loop.UNROLLED), marks=pytest.mark.full),
        dict(biases=Biases.ALL, num_kv_heads=2, loop=Loop.SCAN),
        pytest.param(
            dict(qk_norm=True, num_kv_heads=1, tie_embeddings=True, loop=Loop.UNROLLED),
            marks=pytest.mark.full,
        ),
        # emulated on one device
        dict(name="ladder-fresh", ranks=4, tie_embeddings=True, loop=Loop.SCAN),
    ],
    ids=str,
)
def test_llama_family(changes):
    """Prefill and decode against the NumPy reference over the same whole numbers: only float32's
    rounding may
    differ. Over eight ranks: more than key/value heads, so that several hold the same head and its
    scales.
    """
    name, loop = changes.get("name", "ladder"), changes["loop"]
    changes = {key: value for key, value in changes.items() if key not in ("name", "loop")}
    definition = cases.define(
        name, **{"tensor": 1 if "ranks" in changes else 8, "num_layers": 2, **changes}
    )
    params = cases.parameters(definition)
    shape = cases.shape(name, definition.config, ranks=4)
    tokens, rows = cases.tokens(), np.arange(4)
    full = reference.evaluate(reference.logits, dense(definition, params), tokens, shape)

    params, form = stored(definition, params, loop=loop), dict(loop=loop, quantize=INT8)
    first, caches = decode.prefill(definition, capacity=8, **form)(params, tokens[:, :6], LENGTHS)
    second, _ = one_step.decode(definition, **form)(params, caches, tokens[rows, LENGTHS], LENGTHS)
    limit = cases.bound(definition.config)
    assert cases.error(np.asarray(first)[:, :251], full[rows, LENGTHS - 1]) < limit
    assert cases.error(np.asarray(second)[:, :251], full[rows, LENGTHS]) < limit


def compiled_decode(quantize):
    definition = cases.define(
        "ladder", tensor=4, num_layers=2, d_model=256, d_ff=512, dtype=Dtype.BFLOAT16
    )
    arguments = steps.abstract(definition, rows=2, positions=8, loop=Loop.SCAN, quantize=quantize)
    many = decode.decode_many(
        definition, choice=decode.Choice.GREEDY, loop=Loop.SCAN, quantize=quantize
    )
    return many.compile(*arguments)


def test_a_compiled_step_takes_half_the_bytes():
    """Not less: beside the whole numbers there are scales, norm gains, caches."""
    sizes = [
        compiled_decode(kind).memory_analysis().argument_size_in_bytes
        for kind in (INT8, Quantize.NONE)
    ]
    assert 0.5 < sizes[0] / sizes[1] < 0.53


def test_the_command_line_says_what_there_is(capsys):
    from ladder_jax import cli

    status = cli.main(
        "overlap --model tiny --target cpu:8 --phase train --residual ladder --quantize int8".split()
    )
    assert status == 2
    assert (
        capsys.readouterr().err
        == "ladder-jax: --quantize int8 is for prefill and decode, not for train\n"
    )
