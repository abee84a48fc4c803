"""Inference with experts: prefill, chunks, decode steps, generation and the engine, in 8 bits
too.
"""

import jax
import numpy as np
import pytest

from ladder_jax import checkpoint
from ladder_jax.config import Loop, Quantize
from ladder_jax.decode import steps, weights
from ladder_jax.nn import experts as package
from tests import cases, covering, engines, experts, starts

LENGTHS = np.array([1, 4, 6, 3], np.int32)
CASES = covering.rows(
    ("standard", "ladder", "farskip", "hybrid-farskip"),
    ("shared", "routed", "dense", "dense-2"),
    (1, 4, 8),
    Loop,
    pairs=[],
    even=[0, 1, 2, 3],
)
# standard: the others have its loop, kind and mesh
CASES[0] = covering.full(*CASES[0].values)


@pytest.mark.parametrize("name, kind, tensor, loop", CASES)
def test_prefill_chunks_and_decode_equal_the_full_pass(name, kind, tensor, loop, tmp_path):
    """With prompts of different lengths in one batch and rubbish beyond their ends; of a
    checkpoint's weights, which are the same whether they are read layer by layer or whole.
    """
    definition = experts.define(name, kind, tensor=tensor)
    starts.save(tmp_path, definition)
    saved = checkpoint.open_checkpoint(tmp_path)
    stored = weights.prepare(definition, checkpoint.Pieces(saved, definition), loop=loop)
    whole = weights.prepare(definition, saved.params(definition), loop=loop)
    jax.tree.map(np.testing.assert_array_equal, stored, whole)
    shapes = weights.abstract(definition, loop=loop)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.shape == b.shape, stored, shapes)))
    tokens, full, rows = experts.tokens(), experts.dense_logits(name, kind), np.arange(4)
    limit = 2 * cases.bound(definition.config)
    programs = cases.programs(definition, loop=loop)
    cases.check_prefill_and_decode(programs, stored, LENGTHS, full, new=2, limit=limit)
    logits, _ = steps.prefill_in_chunks(
        definition, stored, tokens[:, :8], LENGTHS, capacity=32, chunk=4, loop=loop
    )
    assert cases.error(logits[:, :251], full[rows, LENGTHS - 1]) < limit


def test_scanned_routers_and_biases_stay_float32():
    definition = experts.define("ladder", biases="qkv", **starts.BFLOAT16)
    stored = weights.prepare(definition, cases.placed(definition), loop=Loop.SCAN)
    assert stored["layers"]["mlp"]["router"].dtype == np.float32
    assert stored["layers"]["attention"]["key_bias"].dtype == np.float32
    assert stored["layers"]["mlp"]["experts"]["up"].dtype == definition.config.dtype.value


def test_a_long_prompt_in_chunks_of_tokens(monkeypatch):
    """Where a program's tokens are more than the sublayer computes at once."""
    monkeypatch.setattr(package, "CHUNK", 6)
    definition = experts.define("farskip", tensor=4, rope_theta=10_001.0)  # a program of its own
    experts.check_prefill("farskip", definition, [16] * 4)


@pytest.mark.parametrize("loop", Loop)
def test_eight_bits(loop):
    """The router keeps its own values."""
    definition = experts.define("farskip", tensor=4)
    experts.check_prefill("farskip", definition, [16] * 4, loop=loop, quantize=Quantize.INT8)


def test_the_engine_answers_each_request_as_if_it_were_alone():
    definition = experts.define("farskip", tensor=4, num_layers=2)
    prompts = [[1, 2, 3], [200], [*range(8)], [7] * 4]
    params = cases.placed(definition)
    engines.check_as_alone(
        definition, params, prompts, new=8, loop=Loop.SCAN, slots=3, capacity=64, chunk=5
    )
