"""Prefill in chunks: its attention against NumPy, the whole against one pass, and its memory."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ladder_jax import decode
from ladder_jax.config import Loop
from ladder_jax.decode import steps, weights
from ladder_jax.nn import attention, tpu_attention
from tests import cases, compilations, covering, reference, test_kernels
from tests.refusals import refused

CAPACITY = 1100  # positions, no multiple of the kernels' blocks


KERNELS = {
    "xla": functools.partial(attention.extend, kernel=attention.Kernel.XLA),
    "splash": lambda query, key, value, start: tpu_attention.extend(
        query, key.swapaxes(1, 2), value.swapaxes(1, 2), start, interpret=True
    ),
    "splash on a TPU": functools.partial(attention.extend, kernel=attention.Kernel.SPLASH),
}


@functools.cache
def on_mesh(kernel):
    return test_kernels.on_mesh(KERNELS[kernel], P())


@pytest.mark.parametrize("kernel", ["xla", "splash"])
@pytest.mark.parametrize(
    "start, length",
    [(0, 24), (7, 24), (488, 24), (500, 24), (1024, 24), (CAPACITY - 24, 24), (300, 600)],
)
def test_a_block_attends_to_the_cache_before_it(start, length, kernel):
    """With rubbish beyond the block's end; where a block of keys is half seen, unseen, or the
    shortened last; and with several blocks of queries.
    """
    rng = np.random.default_rng(start)
    query = rng.standard_normal((2, length, 8, 16)).astype(np.float32)
    key, value = (rng.standard_normal((2, CAPACITY, 4, 16)).astype(np.float32) for _ in range(2))
    key[:, start + length :] *= 1e4
    value[:, start + length :] = 1e4
    ours = on_mesh(kernel)(query, key, value, np.int32(start))
    limit = 16 * np.sqrt(CAPACITY) * cases.UNIT_ROUNDOFF  # a softmax and two sums of as many terms
    seen = np.tri(length, CAPACITY, start, dtype=bool)
    assert cases.error(ours, reference.attend(query, key, value, seen)) < limit


def test_a_block_is_written_where_jax_has_64_bits():
    """Whose own numbers are then no longer of a start's 32."""
    block = np.ones((2, 3, 4, 16), np.float32)
    cache = attention.Cache(*np.zeros((2, 2, 8, 4, 16), np.float32))

    def attend(start):
        positions = attention.ChunkedPrefill(start)
        return positions.attend(block, block, block, cache=cache, kernel=attention.Kernel.XLA)

    with jax.enable_x64(True):
        attended, _ = jax.eval_shape(attend, jax.ShapeDtypeStruct((), jnp.int32))
    assert attended.shape == block.shape


def test_the_splash_kernel_of_a_traced_start_lowers_for_tpus():
    """To Mosaic: values are the interpreter's above, machine code is libtpu's to make."""
    shapes = [
        jax.ShapeDtypeStruct((2, t, n, 128), jnp.bfloat16)
        for t, n in ((256, 8), (1024, 4), (1024, 4))
    ]
    traced = on_mesh("splash on a TPU").trace(*shapes, jax.ShapeDtypeStruct((), jnp.int32))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


LENGTHS = np.array([1, 4, 10, 7], np.int32)
MESHES = [(1, 1), (1, 4), (1, 8), (2, 4)]  # over 8 ranks, two share each of the 4 key/value heads
CASES = covering.marked(
    itertools.product(cases.TOPOLOGIES, MESHES, Loop),
    chosen=covering.array(cases.RECURRENCES, MESHES, Loop, pairs=[(1, 2)], even=[1]),
)


@pytest.mark.parametrize("name, mesh, loop", CASES)
def test_chunks_equal_one_pass(name, mesh, loop):
    """A chunk that does not divide the length; prompts that end in every chunk."""
    definition, full = cases.on_mesh(name, *mesh)
    prompts = cases.with_rubbish(cases.tokens(), LENGTHS)
    stored = weights.prepare(definition, cases.placed(definition), loop=loop)
    logits, _ = decode.prefill_in_chunks(
        definition, stored, prompts, LENGTHS, capacity=12, chunk=4, loop=loop
    )
    limit = 2 * cases.bound(definition.config)
    assert cases.error(logits[:, :251], full[np.arange(4), LENGTHS - 1]) < limit


def test_a_cache_without_room():
    definition = cases.define("ladder")
    stored = weights.prepare(definition, cases.placed(definition), loop=Loop.UNROLLED)
    for chunk in (4, 9):  # 9: one pass
        with refused("a cache of 8 positions has no room for 9 tokens"):
            decode.prefill_in_chunks(
                definition, stored, cases.tokens((1, 9)), np.array([9]), capacity=8, chunk=chunk
            )


def test_one_program_reads_prompts_of_any_length():
    definition = cases.define("standard", num_layers=2, tensor=4)
    stored = weights.prepare(definition, cases.placed(definition), loop=Loop.SCAN)
    read = functools.partial(
        decode.prefill_in_chunks, definition, stored, capacity=32, chunk=4, loop=Loop.SCAN
    )
    read(cases.tokens((1, 9)), np.array([9], np.int32))
    with compilations.counted() as compiled:
        read(cases.tokens((1, 31)), np.array([31], np.int32))
        assert not compiled
        read(cases.tokens((1, 3)), np.array([3], np.int32))
        assert compiled  # the control: one pass, of another length


def program(definition, *, chunk, capacity):
    caches = steps.abstract_cache(definition, rows=1, capacity=capacity, loop=Loop.UNROLLED)
    tokens, start, lengths = (
        jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1, chunk), (), (1,))
    )
    return decode.extend(definition).compile(
        weights.abstract(definition, loop=Loop.UNROLLED), caches, tokens, start, lengths
    )


def test_memory_does_not_grow_with_the_context():
    definition = cases.define("ladder", num_layers=2, tensor=4)
    heads = 8 // 4
    context = 8192
    chunk = 256
    at, beyond = (
        program(definition, chunk=chunk, capacity=s).memory_analysis()
        for s in (context, 2 * context)
    )
    scores = 4 * heads * context**2  # bytes, of a rank and one layer of one pass
    assert at.temp_size_in_bytes < scores / 100
    assert beyond.temp_size_in_bytes < 1.1 * at.temp_size_in_bytes
    # the caches, updated in place
    assert beyond.alias_size_in_bytes == 2 * at.alias_size_in_bytes > 0
