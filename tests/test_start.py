"""Inference starts at the model's size: arrays are read one by one, with the values that reading
all at once gives.
"""

import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from ladder_jax import checkpoint, evaluate, nn
from ladder_jax.checkpoint import Pieces, arrays, writing
from ladder_jax.config import Biases, DecodeConfig, Loop, Quantize
from ladder_jax.decode import weights
from ladder_jax.pretrained import open_model
from tests import cases, compilations, covering, starts


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert_array_equal(a, b)


MODELS = {
    "1": ("ladder", dict(tensor=1)),
    "4, shared heads": ("ladder", dict(tensor=4, num_kv_heads=2)),
    "4, tied, biases": (
        "standard",
        dict(tensor=4, tie_embeddings=True, biases=Biases.ALL, qk_norm=True),
    ),
    "fresh, 4 emulated": ("ladder-fresh", dict(ranks=4, num_kv_heads=2)),
}


ROWS = covering.marked(
    itertools.product(MODELS, ["stack", "layer"]),
    chosen=[
        ("4, shared heads", "layer"),
        ("4, tied, biases", "stack"),
        ("fresh, 4 emulated", "layer"),
    ],
)


@pytest.mark.parametrize("case, chunk", ROWS)
def test_the_values_are_those_of_all_at_once(case, chunk, tmp_path, monkeypatch):
    """On another mesh than the one that wrote them, too, and whatever the chunks hold."""
    name, changes = MODELS[case]
    definition = cases.define(name, num_layers=2, **changes, **starts.BFLOAT16)
    writer = (
        definition
        if name == "ladder-fresh"
        else nn.define(definition.config, mesh=cases.define(name).layout.mesh)
    )
    if chunk == "stack":
        monkeypatch.setattr(
            writing, "_chunks", lambda tree: jax.tree.map(lambda _: writing.ocp.SaveArgs(), tree)
        )
    starts.save(tmp_path, writer)
    saved = checkpoint.open_checkpoint(tmp_path)
    for quantize, loop in itertools.product(Quantize, Loop):
        form = dict(loop=loop, quantize=quantize)
        wanted = weights.prepare(definition, saved.params(definition), **form)
        shapes = jax.tree.map(lambda a: a.shape, wanted)
        assert shapes == jax.tree.map(lambda a: a.shape, weights.abstract(definition, **form))
        for ahead in (1, arrays.AHEAD):
            monkeypatch.setattr(arrays, "AHEAD", ahead)
            same(weights.prepare(definition, Pieces(saved, definition), **form), wanted)


def test_a_chunk_is_a_layer(wide):
    """Of what a run saves: else a layer could not be read without its stack."""
    folder = wide / "checkpoints/1/params"
    for name, layers in (("layers/mlp/up", 4), ("embedding/table", 0)):
        opened = arrays.opened(folder, name).result()
        assert opened.chunk_layout.read_chunk.shape == (
            (1, *opened.shape[1:]) if layers else opened.shape
        )


def test_a_process_reads_its_own_part(wide, monkeypatch):
    """Of several: the columns of its devices, here the last two of four, and no others."""
    definition = nn.define(
        checkpoint.open_checkpoint(wide).config.model,
        mesh=cases.define("ladder", tensor=4).layout.mesh,
    )
    own = dict(list(definition.layout.sharding("DF").devices_indices_map((128, 512)).items())[2:])
    sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: own)
    like = SimpleNamespace(shape=(128, 512), dtype=np.dtype(np.float32), sharding=sharding)
    store = arrays.opened(wide / "checkpoints/1/params", "layers/mlp/up").result()[2]
    reads = arrays.begin_read(store, like)
    shares = []
    assert set(reads) == set(own.values())
    place = lambda share, *_: shares.extend(map(share, own.values()))
    monkeypatch.setattr(arrays.meshes, "place", place)
    arrays._placed(reads, like)
    for share, at in zip(shares, (256, 384), strict=True):
        assert_array_equal(share, store[:, at : at + 128].read().result())


@pytest.fixture
def peak():
    """Checks that at any call below a function no more bytes are on devices than what it keeps,
    and `beside`.
    """

    def check(fn, beside):
        fn()  # compiles, and makes what jax keeps
        gc.collect()  # an earlier engine, in a cycle, would be freed while this one is made
        seen = {}
        most = 0
        before = on_devices(seen)

        def look(frame, event, _):
            nonlocal most
            if event in ("call", "return") and "/ladder_jax/" in frame.f_code.co_filename:
                most = max(most, on_devices(seen))

        sys.setprofile(look)
        try:
            found = fn()
        finally:
            sys.setprofile(None)
        kept = on_devices(seen) - before
        assert kept > 4 * LARGEST  # else the bound would say little
        assert most - before <= kept + beside
        del found  # alive until here

    yield check
    sys.setprofile(None)


def on_devices(seen):
    """Bytes of all arrays that are alive, buffers that several of them share counted once.

    seen: what earlier calls found of each array, by its id, as asking takes long.
    """
    found = {}
    for array in jax.live_arrays():
        if array.is_deleted() or jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue
        known, buffers = seen.get(id(array), (lambda: None, {}))
        if known() is not array:
            shards = array.addressable_shards
            buffers = {(s.device, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}
            seen[id(array)] = weakref.ref(array), buffers
        found |= buffers
    return sum(found.values())


LARGEST = 4 * 512 * 128  # bytes in float32 of `wide`'s tables, and of an MLP's matrices


@pytest.mark.full
@pytest.mark.parametrize("quantize, tensor", list(itertools.product(Quantize, (1, 4))))
def test_no_more_than_one_array_beside_the_weights(wide, peak, quantize, tensor):
    """What is on the devices while an engine is made: at most what it keeps, and its largest array
    in float32.
    """
    opened = open_model(wide)
    settings = DecodeConfig(quantize=quantize)
    sizes = dict(slots=1, capacity=16, max_queue=1)
    peak(lambda: opened.engine(settings=settings, tensor=tensor, **sizes, decoder=None), LARGEST)


@pytest.mark.full
def test_no_more_than_one_array_beside_an_evaluations_weights(wide, peak):
    model = evaluate.open_model(wide)
    largest = 1.5 * LARGEST  # a layer in float32, and in bfloat16 for its stack
    peak(lambda: evaluate.open_model(wide).params, largest)
    peak(lambda: model.engine(capacity=16, slots=1), largest)


def test_few_programs_whatever_the_depth():
    """A layer's arrays compile what all layers' need."""
    counts = []
    for layers in (2, 5):
        definition = cases.define("ladder", num_layers=layers, tensor=2, **starts.BFLOAT16)
        params = cases.placed(definition)
        jax.clear_caches()
        with compilations.counted() as compiled:
            weights.prepare(definition, params, loop=Loop.UNROLLED, quantize=Quantize.INT8)
        counts.append(len(compiled))
    assert counts[0] == counts[1] <= 20
