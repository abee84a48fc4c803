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
    ("shared", "routed", "dense"),
    (1, 4, 8),
    Loop,
    pairs=[],
    even=[0, 1, 2, 3],
)
# standard: the others have its loop, kind and mesh
CASES[0] = pytest.param(*CASES[0].values, marks=pytest.mark.full)


@pytest.mark.parametrize("name, kind, tensor, loop", CASES)
def test_prefill_chunks_and_decode_equal_the_full_pass(name, kind, tensor, loop):
    """With prompts of different lengths in one batch and rubbish beyond their ends."""
    definition = experts.define(name, kind, tensor=tensor)
    params = cases.placed(definition)
    stored = weights.prepare(definition, params, loop=loop)
    check(definition, stored, loop=loop, full=experts.dense_logits(name, kind))


DENSE_FIRST = covering.marked(
    covering.array(
        ("standard", "ladder", "farskip", "hybrid-farskip"),
        (1, 2),
        (1, 4, 8),
        Loop,
        pairs=[(0, 1), (2, 3)],
        even=[0, 1],
    ),
    chosen=[],
)


@pytest.mark.parametrize("name, dense, tensor, loop", DENSE_FIRST)
def test_dense_layers_first_from_a_checkpoint(name, dense, tensor, loop, tmp_path):
    """What is read from it layer by layer is what is made of all of it. Query and key norms run
    over all heads, too.
    """
    definition = experts.define(name, tensor=tensor, dense_layers=dense, **experts.ALL_HEADS)
    stored = of_a_checkpoint(tmp_path, definition, loop=loop)
    of = experts.shape(name, definition.config)
    full = reference.evaluate(reference.logits, cases.parameters(definition), experts.tokens(), of)
    check(definition, stored, loop=loop, full=full)


def test_a_checkpoint_has_two_stacks(tmp_path):
    definition = experts.define("farskip", "dense", tensor=2)
    layers = of_a_checkpoint(tmp_path, definition, loop=Loop.UNROLLED)
    assert [len(layers["dense"]), len(layers["layers"])] == [1, 2]
    assert "gate" in layers["dense"][0]["mlp"] and "router" in layers["layers"][1]["mlp"]


def of_a_checkpoint(folder, definition, *, loop):
    starts.save(folder, definition)
    saved = checkpoint.open_checkpoint(folder)
    stored = weights.prepare(definition, checkpoint.Pieces(saved, definition), loop=loop)
    same = weights.prepare(definition, saved.params(definition), loop=loop)
    jax.tree.map(np.testing.assert_array_equal, stored, same)
    shapes = weights.abstract(definition, loop=loop)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.shape == b.shape, stored, shapes)))
    return stored


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
    definition = experts.define("farskip", tensor=4, rope_theta=10_001.0)  # a program of its own
    params = cases.placed(definition)
    stored, tokens = weights.prepare(definition, params, loop=Loop.SCAN), experts.tokens()[:, :16]
    logits, _ = decode.prefill(definition, capacity=32, loop=Loop.SCAN)(
        stored, tokens, np.full(4, 16, np.int32)
    )
    of = experts.shape("farskip", definition.config)
    expected = reference.evaluate(reference.logits, cases.parameters(definition), tokens, of)[:, -1]
    assert cases.error(np.asarray(logits)[:, :251], expected) < 2 * cases.bound(definition.config)


@pytest.mark.parametrize("loop", Loop)
def test_eight_bits(loop):
    """The logits are those of the matrices that the 8 bits stand for; the router keeps its own
    values.
    """
    definition = experts.define("farskip", tensor=4)
    params = cases.parameters(definition)
    stored = weights.prepare(
        definition, cases.place(params, definition), loop=loop, quantize=Quantize.INT8
    )
    layer = stored["layers"] if loop is Loop.SCAN else stored["layers"][0]
    kinds = jax.tree.map(
        lambda a: type(a) is Int8, layer["mlp"], is_leaf=lambda a: isinstance(a, Int8)
    )
    assert kinds["experts"] == dict(gate=True, up=True, down=True) and not kinds["router"]
    prefill = decode.prefill(definition, capacity=32, loop=loop, quantize=Quantize.INT8)
    logits, _ = prefill(stored, experts.tokens()[:, :16], np.full(4, 16, np.int32))
    expected = reference.evaluate(
        reference.logits,
        reference.in_eight_bits(params, definition.dims),
        experts.tokens()[:, :16],
        experts.shape("farskip", definition.config),
    )
    assert cases.error(np.asarray(logits)[:, :251], expected[:, -1]) < 2 * cases.bound(
        definition.config
    )


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
