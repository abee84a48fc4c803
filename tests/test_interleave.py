"""Two halves of a batch in turn: the function of the whole batch, for every topology, and sums that
stand apart.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ladder_jax import config, decode, train
from ladder_jax.config import Launch, Loop, Remat
from ladder_jax.data.packing import Batch
from ladder_jax.nn import transformer
from ladder_jax.residual.recurrence import barrier_forward
from ladder_jax.residual.wires import sequence
from ladder_jax.scopes import ENTER, LAUNCH
from tests import cases, communication, covering, engines, experts, test_your_layers as your_layers
from tests.refusals import refused

REDUCING = [name for name, case in cases.TOPOLOGIES.items() if case[2] not in ("desync", "none")]
# of tokens [B, T + 1]: halves of rows, of those of a split stream, and, of an odd number, of
# sequences
FORMS = {
    "rows": ((4, 9), {}),
    "split rows": ((4, 9), dict(sequence_parallel=True)),
    "sequences": ((3, 10), {}),
}
REMATS = [Remat.NONE, Remat.FULL, Remat.SAVE_MATMULS]
RECURRENCES = [name for name in cases.RECURRENCES if name in REDUCING]
GRADIENTS = covering.marked(
    itertools.product(REDUCING, FORMS, Loop, REMATS),
    chosen=covering.array(RECURRENCES, FORMS, Loop, REMATS, pairs=[(1, 2)], even=[3]),
)


@pytest.mark.parametrize("name, form, loop, remat", GRADIENTS)
def test_gradients(name, form, loop, remat):
    """Against the float64 reference; and every half's every sum is an all-reduce of its own, in
    both directions.
    """
    shape, split = FORMS[form]
    settings = dict(loop=loop, remat=remat, interleave=2, **split)
    text = cases.check_case(name, dict(tensor=4), shape_BT=shape, **settings)
    if split or loop is Loop.SCAN:
        return
    found = communication.all_reduces(text)
    assert all(operands == 1 for *_, operands, _ in found), "merged"
    for direction in (LAUNCH, ENTER):
        assert sum(one[0] == direction for one in found) == 2 * communication.IN_ALL[name]


def test_a_split_streams_sums_are_awaited_after_the_first_products(monkeypatch):
    """Of the other half's sublayer: an MLP's two products of 2 rows, and a rank's 2 positions."""
    tied = []

    def barrier(arrays):
        tied.append([np.shape(array) for array in jax.tree.leaves(arrays)])
        return barrier_forward(arrays)

    monkeypatch.setattr(sequence, "barrier_forward", barrier)
    gradients(cases.define("standard", tensor=4), sequence_parallel=True)
    product = (2, 8, 12)
    awaited = (2, 2, 32)
    assert [product, product, awaited] in tied, tied


def test_half_of_a_sequence_is_half_of_the_work():
    """A layer's FLOPs, by hand: four matrices of attention, three of the MLP, and the scores."""
    definition = cases.define("standard", tensor=4)
    matrices = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    work = lambda positions: 2 * matrices * positions + 2 * 32 * positions**2
    for length, unit in (2, 1), (9, 1), (100, 1), (511, 1), (512, 128), (4096, 128):
        left = {at: abs(2 * work(at) - work(length)) for at in range(unit, length, unit)}
        assert transformer.half_of_sequence(definition, length) == min(left, key=left.get)


@pytest.mark.parametrize("mesh, settings", [
    (dict(data=2, fsdp=2, tensor=2), dict(accumulate=2, remat=Remat.FULL)),
    covering.full(dict(data=2, fsdp=2, tensor=2), dict(accumulate=2, loop=Loop.UNROLLED)),
    covering.full(dict(fsdp=2, tensor=2), dict(remat=Remat.FULL)),
])  # fmt: skip
def test_beside_the_other_axes(mesh, settings):
    form = dict(mesh, num_layers=3)
    cases.check_case("hybrid-list", form, shape_BT=(16, 9), interleave=2, **settings)


@pytest.mark.parametrize("rows", [3, covering.full(4)])
def test_packed_documents(rows):
    """A position of the later half attends to those of its own document in the first one, and to no
    other.
    """
    definition = cases.define("ladder", tensor=4, num_layers=2)
    segments = np.repeat(np.array([[1, 1, 1, 2, 2, 2, 2, 2, 2, 3]]), rows, 0)
    batch = Batch(tokens=cases.tokens((rows, 10)), segments=segments, loss_mask=None)
    params = cases.placed(definition)
    whole, halves = (
        jax.jit(train.loss_and_gradients(definition, interleave=count))(params, batch)
        for count in (1, 2)
    )
    cases.assert_close(halves, whole, definition=definition)


@pytest.mark.parametrize("name", ["standard", covering.full("ladder")])
def test_experts_whose_sums_are_reduced(name):
    """Their statistics are sums over both halves, so the routers' losses are those of the whole
    batch.
    """
    definition = experts.define(name, "shared", tensor=4, num_layers=2)
    expected = experts.dense_gradients(name, "shared", num_layers=2)
    experts.check_gradients(definition, expected, interleave=2)


PREFILLS = covering.rows(
    ["standard", "ladder-fresh", "hybrid-delay-2"], Loop, (4, 1, 3), pairs=[], even=[1]
)


@pytest.mark.parametrize("name, loop, rows", [("exchanging", Loop.SCAN, 4), *PREFILLS])
def test_prefill(name, loop, rows):
    """Logits and caches, of halves of rows and of a row's positions: the second reads what the
    first has written.
    """
    exchanging = name == "exchanging"
    definition = experts.exchanging("standard") if exchanging else cases.define(name, tensor=4)
    settings = dict(loop=loop, sequence_parallel=exchanging)
    whole, halves = (
        cases.prefilled(
            definition, cases.tokens((rows, 8)), [8, 5, 7, 3][:rows], interleave=count, **settings
        )
        for count in (1, 2)
    )
    assert max(map(cases.error, halves, whole)) < cases.bound(definition.config)


@pytest.mark.parametrize("name, changes, count", [
    ("standard", dict(tensor=8), 7),
    covering.full("ladder", dict(tensor=8), 7),
    ("standard", dict(tensor=4, qk_norm="all-heads"), 4),
])  # fmt: skip
def test_prefill_that_starts_and_awaits_apart(name, changes, count, monkeypatch):
    """Of two layers: every half's every sum but the last is started before the other half's
    sublayer; only MLPs stand beside one where attention's query and key norms reduce over all heads.
    """
    started = communication.start_on_a_cpu(monkeypatch)
    definition = cases.define(name, num_layers=2, **changes)
    form = dict(loop=Loop.UNROLLED)
    asked = definition, cases.tokens((4, 8)), [8] * 4
    decode.prefill.cache_clear()
    halves, *_ = cases.prefilled(*asked, launch=Launch.EXPLICIT, interleave=2, **form)
    assert len(started) == count
    whole, *_ = cases.prefilled(*asked, launch=Launch.CHAINED, **form)
    assert cases.error(halves, whole) < cases.bound(definition.config)


@pytest.mark.parametrize("rows", [1, covering.full(2)])
def test_text_of_prompts_that_are_read_in_halves(rows):
    """Whole, in chunks, and by the engine: the same tokens."""
    definition = cases.define("standard", tensor=2, num_layers=1)
    params = cases.placed(definition)
    prompts = [list(row) for row in cases.tokens((rows, 40))]
    generator = decode.Generator(definition, params)
    texts = []
    for interleave, chunk in (1, 2048), (2, 2048), (2, 16):
        settings = config.DecodeConfig(max_new_tokens=5, prefill_chunk=chunk, interleave=interleave)
        texts.append(generator.tokens(prompts, config=settings).tolist())
    assert texts[1:] == texts[:1] * 2
    engines.check_as_alone(
        definition, params, prompts, new=5, slots=2, capacity=48, interleave=2, prefill_chunk=16
    )


@pytest.mark.parametrize("loop", Loop)
def test_layers_of_your_own(loop):
    run = your_layers.of_run("ladder-2", loop=loop, interleave=2)
    found = your_layers.on_ranks(your_layers.with_gradients(run), out=your_layers.OUT)
    your_layers.check_rule(found, "ladder-2")


def own_layers(rows, *, interleave):
    run = your_layers.of_run("ladder", interleave=interleave)
    your_layers.on_ranks(lambda x, stacked: run(x[:rows], stacked))


def of_run(*, residual="standard", **settings):
    changed = config.TrainConfig(batch=4, sequence=8, steps=2, interleave=2, **settings)
    model = config.preset("tiny", residual=residual)
    return config.RunConfig(model, config.MeshConfig(tensor=2), changed)


def gradients(definition, **settings):
    shapes = definition.abstract, jax.ShapeDtypeStruct((4, 9), jnp.int32)
    jax.eval_shape(train.loss_and_gradients(definition, interleave=2, **settings), *shapes)


RING = dict(sequence_parallel=True, collective_matmul=config.CollectiveMatmul.RING)


@pytest.mark.parametrize("said, made", {
    "interleave=2 is for a residual that reduces every": lambda: of_run(residual="desync-2"),
    "halves the rows of a split stream .*: 1 is an odd": lambda: of_run(sequence_parallel=True, accumulate=4),
    "hides gathers and scatters, of which collective_matmul=ring leaves none": lambda: of_run(**RING),
    "interleave=2 takes halves of the rows, and 1 is odd": lambda: own_layers(1, interleave=2),
    r"interleave must be 1 .* or 2 \(two halves of it in turn\), not 3": lambda: own_layers(2, interleave=3),
    "interleave=2 is not for farskip with a shared expert, which is reduced with attention":
        lambda: gradients(experts.define("farskip", "shared", tensor=4)),
    "every sublayer's output, not desync-2": lambda: gradients(cases.define("desync-2", tensor=4)),
    r"interleave must be 1 \(the whole batch\) or 2": lambda: config.Execution(interleave=3),
    r"unknown value for train.interleave: .* \(allowed: 1, 2, auto\)": lambda: config.TrainConfig(interleave=3),
    r"unknown value for decode.interleave: .* \(allowed: 1, 2, auto\)": lambda: config.DecodeConfig(interleave=0),
    "decode.prefill_chunk=1 has no halves": lambda: config.DecodeConfig(interleave=2, prefill_chunk=1),
    "collective_matmul=ring leaves none": lambda: gradients(cases.define("standard", tensor=4), **RING),
}.items())  # fmt: skip
def test_what_is_refused(made, said):
    with refused(said):
        made()


EXCHANGED = covering.marked(
    itertools.product(
        ["standard", "ladder", "ladder-2"], ["shared", "ungated", "routed"], Loop, REMATS
    ),
    chosen=[
        ("standard", "shared", Loop.UNROLLED, Remat.NONE),
        ("ladder", "ungated", Loop.SCAN, Remat.SAVE_MATMULS),
    ],
)


@pytest.mark.parametrize("name, kind, loop, remat", EXCHANGED)
def test_experts_that_exchange_rows(name, kind, loop, remat):
    """Every half's rows are sent by themselves."""
    mesh = dict(data=2 if name == "ladder" else 1, tensor=2 if loop is Loop.SCAN else 4)
    layers = dict(num_layers=2)
    expected = experts.dense_gradients(name, kind, **layers)
    definition = experts.exchanging(name, kind, **layers, **mesh)
    text = experts.check_gradients(
        definition, expected, loop=loop, remat=remat, sequence_parallel=True, interleave=2
    )
    if loop is Loop.UNROLLED and remat is Remat.NONE:
        sent = text.count(" all-to-all(")
        assert sent == 2 * 2 * 2 * 2  # layers, to the experts and back, halves, directions
