"""Inference with experts: prefill, chunks, decode steps, generation and the engine, in 8 bits
too.
"""

import jax
import numpy as np
import pytest

from ladder_jax import checkpoint, decode
from ladder_jax.config import DecodeConfig, Loop, Quantize
from ladder_jax.decode import Engine, Request, steps, weights
from ladder_jax.nn import experts as package
from ladder_jax.nn.quantized import Int8
from tests import cases, covering, experts, one_step, reference, starts

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
CASES[0] = pytest.param(*CASES[0].values, marks=pytest.mark.full)


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
    check(definition, stored, loop=loop, full=experts.dense_logits(name, kind))


def test_a_checkpoint_has_two_stacks():
    layers = weights.abstract(experts.define("farskip", "dense", tensor=2), loop=Loop.UNROLLED)
    assert [len(layers["dense"]), len(layers["layers"])] == [1, 2]
    assert "gate" in layers["dense"][0]["mlp"] and "router" in layers["layers"][1]["mlp"]


def check(definition, stored, *, loop, full):
    tokens, rows, limit = experts.tokens(), np.arange(4), 2 * cases.bound(definition.config)
    prompts = np.where(np.arange(8)[None] < LENGTHS[:, None], tokens[:, :8], 99)
    error = lambda logits, lengths: cases.error(
        np.asarray(logits)[:, :251], full[rows, lengths - 1]
    )

    logits, _ = steps.prefill_in_chunks(
        definition, stored, prompts, LENGTHS, capacity=32, chunk=4, loop=loop
    )
    assert error(logits, LENGTHS) < limit
    logits, caches = decode.prefill(definition, capacity=32, loop=loop)(stored, prompts, LENGTHS)
    assert error(logits, LENGTHS) < limit
    lengths, step = LENGTHS, one_step.decode(definition, loop=loop)
    for _ in range(2):
        logits, caches = step(stored, caches, tokens[rows, lengths], lengths)
        lengths = lengths + 1
        assert error(logits, lengths) < limit


def test_a_long_prompt_in_chunks_of_tokens(monkeypatch):
    """Where a program's tokens are more than the sublayer computes at once."""
    monkeypatch.setattr(package, "CHUNK", 6)
    own = dict(rope_theta=10_001.0)  # a program of its own
    definition = experts.define("farskip", tensor=4, **own)
    expected = experts.dense_logits("farskip", "shared", **own)[:, 15]
    found, *_ = cases.prefilled(definition, experts.tokens()[:, :16], [16] * 4)
    assert cases.error(found, expected) < 2 * cases.bound(definition.config)


@pytest.mark.parametrize("loop", Loop)
def test_eight_bits(loop):
    """The logits are those of the matrices that the 8 bits stand for; the router keeps its own
    values.
    """
    definition = experts.define("farskip", tensor=4)
    settings = dict(loop=loop, quantize=Quantize.INT8)
    stored = weights.abstract(definition, **settings)["layers"]
    mlp = (stored if loop is Loop.SCAN else stored[0])["mlp"]
    assert all(isinstance(mlp["experts"][name], Int8) for name in ("gate", "up", "down"))
    assert not isinstance(mlp["router"], Int8)
    params = reference.in_eight_bits(cases.parameters(definition), definition.dims)
    shape = experts.shape("farskip", definition.config)
    expected = reference.evaluate(reference.logits, params, experts.tokens(), shape)[:, 15]
    found, *_ = cases.prefilled(definition, experts.tokens()[:, :16], [16] * 4, **settings)
    assert cases.error(found, expected) < 2 * cases.bound(definition.config)


def test_the_engine_answers_each_request_as_if_it_were_alone():
    definition = experts.define("farskip", tensor=4, num_layers=2)
    params = cases.placed(definition)
    prompts = [[1, 2, 3], [200], list(range(8)), [7, 7, 7, 7]]
    alone = decode.Generator(definition, params, loop=Loop.SCAN)
    expected = [
        alone.tokens([prompt], config=DecodeConfig(max_new_tokens=8))[0].tolist()
        for prompt in prompts
    ]
    with Engine(definition, params, slots=3, capacity=64, chunk=5, loop=Loop.SCAN) as engine:
        handles = [engine.submit(Request(tuple(prompt), max_new_tokens=8)) for prompt in prompts]
        assert [list(handle.result().tokens) for handle in handles] == expected
