"""Packing: every document whole, once an epoch, and unseen by its neighbours."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest

from ladder_jax import nn, parallel, train
from ladder_jax.config import Loop, Remat
from ladder_jax.data.packing import Batch, pack
from ladder_jax.nn import attention, tpu_attention
from tests import cases, engines, reference
from tests.covering import full


def best_fit(lengths, row):
    """Piece by piece, longest first, into the row that it leaves least room in; of several, any."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        rooms.append((rooms.pop(rooms.index(min(fitting))) if fitting else row) - length)
    return sorted(rooms)


@pytest.fixture(params=range(20))
def packed(request):
    """(starts, lengths, tokens a row, the rows) of documents of random lengths."""
    rng = np.random.default_rng(request.param)
    row = int(rng.integers(2, 40))
    lengths = rng.integers(0, 100, rng.integers(1, 80))
    if request.param % 2:
        lengths = np.minimum(lengths, rng.integers(1, row + 1))  # none that must be cut
    starts = np.cumsum(lengths) - lengths
    return starts, lengths, row, pack(starts, lengths, row=row)


def test_rows_hold_every_token_once(packed):
    starts, lengths, row, (start, length, _) = packed
    pieces = list(zip(start.tolist(), length.tolist()))
    for start, length in zip(starts.tolist(), lengths.tolist()):
        mine = sorted(piece for piece in pieces if start <= piece[0] < start + length)
        if length <= row:
            assert mine == ([(start, length)] if length else [])
            continue
        # Each token but the first is predicted once: a piece begins with the token that the one
        # before ended with.
        predicted = [token for first, size in mine for token in range(first + 1, first + size)]
        assert predicted == list(range(start + 1, start + length))


def test_rows_are_filled_best_and_always_alike(packed):
    starts, lengths, row, (start, length, first) = packed
    filled = [int(length[a:b].sum()) for a, b in zip(first, first[1:])]
    assert all(0 < tokens <= row for tokens in filled)
    assert first[-1] == len(start) == len(length)
    assert sorted(row - tokens for tokens in filled) == best_fit(length.tolist(), row)
    for one, again in zip((start, length, first), pack(starts, lengths, row=row)):
        assert np.array_equal(one, again)


def test_nothing_to_pack():
    assert pack(np.array([], np.int64), np.array([], np.int64), row=8)[2].tolist() == [0]


def documents(lengths, *, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 251, length).astype(np.int32) for length in lengths]


def batch(rows, *, length):
    """Rows of documents, padded: a Batch of NumPy arrays."""

    def padded(parts):
        joined = np.concatenate(parts)
        return np.pad(joined, (0, length - len(joined)))

    tokens = [padded(row) for row in rows]
    numbers = [[np.full(len(one), n, np.int32) for n, one in enumerate(row, 1)] for row in rows]
    return Batch(np.stack(tokens), np.stack([padded(row) for row in numbers]))


@pytest.fixture(scope="module")
def unpacked():
    """Documents of two lengths; their loss and gradient alone, in float64, weighted by what they
    predict.
    """
    definition = cases.define("ladder", num_layers=2)
    params = cases.parameters(definition)
    shape = cases.shape("ladder", definition.config, ranks=1)
    of = lambda texts: reference.evaluate(reference.loss, params, texts, shape, gradient=True)
    long = np.stack(documents([9, 9, 9]))  # of which 24 tokens are predicted
    short = np.stack(documents([5, 5], seed=1))  # 8
    mean = lambda of_long, of_short: 3 / 4 * of_long + 1 / 4 * of_short
    loss, gradients = jax.tree.map(mean, of(long), of(short))
    (single,) = documents([1], seed=2)
    rows = [[long[0], short[0], single], [short[1], long[1]], [long[2]], [np.zeros(0, np.int32)]]
    return batch(rows, length=16), loss, gradients


@pytest.mark.parametrize(
    "mesh, form",
    [
        (dict(), dict(loop=Loop.SCAN)),
        full(dict(data=2, tensor=4), dict(loop=Loop.SCAN, remat=Remat.FULL)),
        (dict(data=2, tensor=4), dict(loop=Loop.UNROLLED, remat=Remat.SAVE_MATMULS)),
    ],
    ids=["one device", "recomputed", "unrolled"],
)
def test_the_packed_loss_is_that_of_the_documents(unpacked, mesh, form):
    packed, loss, grads = unpacked
    definition, params = engines.parts(num_layers=2, **mesh)
    found = jax.jit(train.loss_and_gradients(definition, **form))(params, packed)
    cases.assert_close(found, (loss, grads), definition=definition)
    if not mesh:
        limit = cases.bound(definition.config, passes=2)
        assert cases.error(train.mean_loss(definition)(params, packed), loss) < limit


def test_emulated_ranks_pack_as_real_ones(unpacked):
    packed, *_ = unpacked
    losses = []
    for mesh in (dict(), dict(tensor=4)):
        definition, params = engines.parts("ladder-fresh", ranks=4, **mesh)
        losses.append(train.mean_loss(definition)(params, packed))
    assert cases.error(*losses) < cases.bound(definition.config)


def on_a_tpu(query, key, value, *, segments):
    """As on a TPU, but for the kernel's interpreter."""
    with mock.patch.object(
        tpu_attention, "causal", functools.partial(tpu_attention.causal, interpret=True)
    ):
        return attention.causal(
            query, key, value, kernel=attention.Kernel.SPLASH, segments=segments
        )


def on_a_mesh(attend, query, key, value, segments):
    """(output, gradients) on 2 x 4 devices."""
    weights = np.cos(np.arange(16))[None, None, None]

    def both(query, key, value, segments):
        call = lambda *args: attend(*args, segments=segments)
        weigh = lambda *args: (call(*args) * weights).sum()
        return call(query, key, value), jax.grad(weigh, argnums=(0, 1, 2))(query, key, value)

    heads = jax.P("data", None, "tensor", None)
    specs = dict(in_specs=(heads, heads, heads, jax.P("data", None)), out_specs=heads)
    local = jax.shard_map(both, mesh=parallel.make_mesh(data=2, tensor=4), **specs)
    return jax.jit(local)(query, key, value, segments)


def test_attention_within_segments():
    """Of the kernel for TPUs and of XLA's. (cuDNN's is called as in test_kernels.)"""
    rng = np.random.default_rng(0)
    args = rng.standard_normal((3, 2, 70, 4, 16)).astype(np.float32)
    # 0, padding, comes last
    segments = np.sort(rng.integers(0, 4, (2, 70)), axis=1)[:, ::-1].astype(np.int32)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    expected = reference.attend(*args, np.tri(70, dtype=bool) & same)
    limit = 16 * np.sqrt(70) * cases.UNIT_ROUNDOFF  # as in test_kernels
    xla = functools.partial(attention.causal, kernel=attention.Kernel.XLA)
    (out, gradients), (dense, wanted) = (
        on_a_mesh(attend, *args, segments) for attend in (on_a_tpu, xla)
    )
    assert cases.error(out, expected) < limit
    assert cases.error(dense, expected) < limit
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert cases.error(ours, theirs) < 2 * limit


def test_a_number_may_come_again():
    """Of documents apart from each other: equal numbers do not make them one."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 8), np.float32)
    outs = []
    for row in ([1, 1, 2, 2, 2, 1, 1, 0, 1], [1, 1, 2, 2, 2, 3, 3, 0, 4]):
        positions = nn.Packed(np.array([row]))
        assert positions.indices(9).tolist() == [[0, 1, 0, 1, 2, 0, 1, 0, 0]]
        outs.append(positions.attend(query, key, value, cache=None, kernel=attention.Kernel.XLA)[0])
    assert (outs[0] == outs[1]).all()
