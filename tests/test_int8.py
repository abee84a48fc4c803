"""Weights of 8 bits: the numbers, what each matmul loses, and every model against its dense int8
reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ladder_jax import decode
from ladder_jax.config import Biases, Dtype, Loop, Quantize
from ladder_jax.decode import steps, weights
from ladder_jax.nn import quantized
from ladder_jax.nn.quantized import Int8
from tests import cases, covering, reference

INT8 = Quantize.INT8
LENGTHS = np.array([1, 4, 6, 3], np.int32)
# by a stored matrix's dimensions, the matmul that reads it
MATMULS = {
    "DNH": "BTD,DNH->BTNH",
    "DKH": "BTD,DKH->BTKH",
    "NHD": "BTNH,NHD->BTD",
    "DF": "BTD,DF->BTF",
    "FD": "BTF,FD->BTD",
    "VD": "BTD,VD->BTV",
}


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dims", [*MATMULS, "LNHD"])
def test_numbers_are_the_nearest(dims):
    array = random((3, 4, 6, 5)[4 - len(dims) :])
    if dims == "VD":
        array[1] = 0
    made = jax.jit(functools.partial(Int8.of, dims=dims))(array)
    values, scale = reference.eight_bits(array, dims)
    assert made.values.dtype == jnp.int8
    assert made.scale.dtype == jnp.float32
    assert_array_equal(made.values, values)
    assert_array_equal(made.scale, scale.squeeze(reference.summed_axes(dims)))
    assert made.values.ndim == len(Int8.dims(dims).values)
    assert made.scale.ndim == len(Int8.dims(dims).scale)


def test_what_is_not_a_number_stays_visible():
    for bad in (np.nan, np.inf):
        array = random((4, 3))
        array[2, 1] = bad
        out = quantized.einsum("BTD,DF->BTF", jnp.ones((1, 1, 4)), Int8.of(array, "DF"))
        assert_array_equal(np.isnan(out[0, 0]), [False, True, False])


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("dims", MATMULS)
def test_a_matmul_multiplies_the_whole_numbers(dims, dtype):
    """But for what the dtype rounds: the result once, and sums in float32."""
    sizes = dict(B=2, T=3, D=24, N=4, K=2, H=6, F=20, V=30)
    spec = MATMULS[dims]
    shape = lambda letters: tuple(sizes[letter] for letter in letters)
    inputs = spec.split(",")[0]
    output = spec.split("->")[1]
    x = jnp.asarray(random(shape(inputs)), dtype.value)
    weight = random(shape(dims), seed=1)
    out = jax.jit(lambda x, w: quantized.einsum(spec, x, Int8.of(w, dims)))(x, weight)
    assert out.dtype == dtype.value

    wide = np.asarray(x, np.float64)
    dense = reference.in_eight_bits(weight, dims)
    exact = np.einsum(spec, wide, dense)
    magnitudes = np.einsum(spec, abs(wide), abs(dense))
    terms = np.prod([sizes[letter] for letter in inputs if letter not in output])
    unit = 2.0**-9 if dtype is Dtype.BFLOAT16 else cases.UNIT_ROUNDOFF
    limit = 2 * unit * abs(exact) + terms * cases.UNIT_ROUNDOFF * magnitudes
    assert (np.abs(np.asarray(out, np.float64) - exact) <= limit).all()


def test_a_looked_up_row_is_of_the_whole_numbers():
    table = random((30, 8))
    indices = np.array([[3, 29], [0, 3]])
    rows = quantized.rows(Int8.of(table, "VD"), indices, dtype=jnp.float32)
    assert_array_equal(rows, reference.in_eight_bits(table, "VD").astype(np.float32)[indices])


TOPOLOGIES = [
    (name, dict(tensor=4), list(Loop)[index % 2]) for index, name in enumerate(cases.TOPOLOGIES)
]
SHARED = dict(tensor=8, num_layers=2)  # several ranks hold a key/value head and its scales
EMULATED = dict(ranks=4, num_layers=2)
ONE_HEAD = dict(qk_norm=True, num_kv_heads=1, tie_embeddings=True)
MODELS = covering.marked(
    [
        *TOPOLOGIES,
        ("ladder", dict(biases=Biases.QKV, **SHARED), Loop.UNROLLED),
        ("ladder", dict(**ONE_HEAD, **SHARED), Loop.UNROLLED),
    ],
    # the other recurrences' weights are those of one of these
    chosen=[
        ("ladder", dict(biases=Biases.ALL, num_kv_heads=2, **SHARED), Loop.SCAN),
        ("ladder-fresh", dict(tie_embeddings=True, **EMULATED), Loop.SCAN),
        ("parallel-ladder", dict(tensor=4), Loop.UNROLLED),
    ],
)


@pytest.mark.parametrize("name, form, loop", MODELS)
def test_models_compute_with_the_numbers_as_they_are(name, form, loop):
    """Prefill and decode against the reference on the dense matrices that the whole numbers stand
    for: only float32's rounding may differ.
    """
    definition = cases.define(name, **form)
    params, tokens = cases.parameters(definition), cases.tokens()
    shape = cases.shape(name, definition.config, ranks=4)
    dense = reference.in_eight_bits(params, definition.dims)
    full = reference.evaluate(reference.logits, dense, tokens, shape)
    form = dict(loop=loop, quantize=INT8)
    limit = cases.bound(definition.config)
    stored = weights.prepare(definition, cases.place(params, definition), **form)
    programs = cases.programs(definition, **form)
    cases.check_prefill_and_decode(programs, stored, LENGTHS, full, new=1, limit=limit)


def test_a_compiled_step_takes_half_the_bytes():
    """Not less: beside the whole numbers there are scales, norm gains, caches."""
    definition = cases.define(
        "ladder", tensor=4, num_layers=2, d_model=256, d_ff=512, dtype=Dtype.BFLOAT16
    )
    sizes = []
    for quantize in (INT8, Quantize.NONE):
        form = dict(loop=Loop.SCAN, quantize=quantize)
        arguments = steps.abstract(definition, rows=2, positions=8, **form)
        many = decode.decode_many(definition, choice=decode.Choice.GREEDY, **form)
        sizes.append(many.compile(*arguments).memory_analysis().argument_size_in_bytes)
    assert 0.5 < sizes[0] / sizes[1] < 0.53
