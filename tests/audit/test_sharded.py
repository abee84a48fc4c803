"""What the compilers make of weights that are split over the fsdp axis, and of a stream split along the sequence.

4 layers of Llama-3-70B over 8 devices, one row of 1024 tokens on each of the fsdp devices. See `test_overlap.py`.
"""

import collections
import concurrent.futures

import pytest

from ladder_jax.config import Loop, Phase
from ladder_jax.overlap import compile as compiling
from ladder_jax.overlap import request as requests
from ladder_jax.overlap import result
from ladder_jax.schedule.report import Status
from tests.audit.test_overlap import LAYERS, absent, case, until

pytestmark = pytest.mark.audit

MATRICES = 7  # of a layer
# Of 16 all-reduces. An H100's scheduler hides one more where gradients of weights are added in bfloat16; scanned, the
# default, it hides all of the body.
LEAST = {"tpu7x": 15, "h100": 14, "v6e": 15, "v5p": 9}
TRAIN = [case(target, Phase.TRAIN, fsdp=2) for target in ("tpu7x:2x2x1", "h100:8")]
ONE_AT_A_TIME = [case(target, Phase.TRAIN, fsdp=2) for target in ("v5p:2x2x2", "v6e:2x4")]
# No tensor parallelism: a reduce-scatter goes over all three sides of the torus.
ALONE = requests.make(
    model="llama-3.2-1b",
    residual="ladder",
    layers=LAYERS,
    target="v5p:2x2x2",
    phase=Phase.TRAIN,
    loop=Loop.SCAN,
    fsdp=8,
    tensor=1,
)
SCANNED = [case("h100:8", Phase.TRAIN, loop=Loop.SCAN, fsdp=2)]
SPLIT = [
    case(target, Phase.PREFILL, sequence_parallel=True) for target in ("tpu7x:2x2x1", "v6e:2x4", "v5p:2x2x2", "h100:8")
]
STANDARD = [case(target, Phase.PREFILL, "standard", sequence_parallel=True) for target in ("tpu7x:2x2x1", "h100:8")]


@pytest.fixture(scope="session")
def compiled(request):
    """As in `test_overlap.py`: a function that waits for one of the chosen tests' programs."""
    chosen = [item.callspec.params.get("request_") for item in request.session.items if hasattr(item, "callspec")]
    every = [ALONE, *(param.values[0] for param in TRAIN + ONE_AT_A_TIME + SCANNED + SPLIT + STANDARD)]
    wanted = [one for one in every if one in chosen]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        records = {one: pool.submit(compiling.compiled, one, until=until(one)) for one in wanted if not absent(one)}

        def wait(request):
            if reason := absent(request):
                pytest.skip(reason)
            return result.read(request, records[request].result())

        yield wait
        pool.shutdown(cancel_futures=True)


def left(transfers):
    """How many arrays of which layers are not hidden, by (layer, whether backward)."""
    found = collections.Counter()
    for t in transfers:
        if t.status is not Status.HIDDEN:
            found[t.layer, t.backward] += t.count
    return dict(found)


def matrices(transfers, *, backward):
    """Of each layer, how many arrays are moved; a compiler may join vectors of the whole model to them."""
    found = collections.Counter()
    for t in transfers:
        if t.backward is backward:
            found[t.layer] += t.count
    return found


@pytest.mark.parametrize("request_", TRAIN)
def test_weights_and_gradients_are_hidden(request_, compiled):
    """All but what the first layer needs before there is anything to compute, and gives when nothing is left."""
    found = compiled(request_).report
    assert min(matrices(found.gathers, backward=False).values()) >= MATRICES
    assert sorted(matrices(found.gathers, backward=True)) == [str(n) for n in range(LAYERS - 1)]  # the last is kept
    assert len(matrices(found.scatters, backward=True)) >= LAYERS
    assert set(left(found.gathers)) <= {("0", False)}
    assert set(left(found.scatters)) <= {("0", True)}


@pytest.mark.parametrize("request_", TRAIN)
def test_sublayers_reductions_stay_hidden_beside_them(request_, compiled):
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS, 0)
    assert answer.report.hidden == LEAST[request_.target.kind], answer.verdict


@pytest.mark.parametrize("request_", ONE_AT_A_TIME)
def test_where_one_weight_is_gathered_at_a_time(request_, compiled):
    """v5p and v6e: their compiler finds too little compute for each of 7 messages, and leaves the smallest bare."""
    answer = compiled(request_)
    found = answer.report
    assert found.merged == 0 and found.all_reduces == 4 * LAYERS
    assert found.hidden >= LEAST[request_.target.kind], answer.verdict
    for moved, bare in ((found.gathers, ("0", False)), (found.scatters, ("0", True))):
        assert not any(t.collective.synchronous for t in moved)
        inner = [t for t in moved if (t.layer, t.backward) != bare]
        hidden = sum(t.collective.bytes for t in inner if t.status is Status.HIDDEN)
        assert hidden >= 0.9 * sum(t.collective.bytes for t in inner)


@pytest.mark.parametrize("request_", SCANNED)
def test_a_scan_hides_all_of_its_body(request_, compiled):
    found = compiled(request_).report
    for moved in (found.reductions, found.gathers, found.scatters):
        body = [one for one in moved if one.collective.executions > 1]
        assert body and all(one.status is Status.HIDDEN for one in body)
    forward = [t for t in found.gathers if t.collective.executions > 1 and not t.backward]
    assert sum(t.count for t in forward) == LAYERS * MATRICES


@pytest.mark.full
@pytest.mark.parametrize("request_", [ALONE], ids=["llama-3.2-1b-fsdp=8-v5p:2x2x2"])
def test_gradients_are_hidden_without_tensor_parallelism(request_, compiled):
    """Most of their bytes: the last array's has what is left of a layer, which is too little."""
    body = [t for t in compiled(request_).report.scatters if t.collective.executions > 1]
    assert sum(t.count for t in body) == LAYERS * MATRICES
    assert not any(t.collective.synchronous for t in body)
    moved = lambda these: sum(t.collective.bytes for t in these)
    assert moved([t for t in body if t.status is Status.HIDDEN]) > moved(body) / 2


@pytest.mark.parametrize("request_", SPLIT)
def test_both_halves_of_a_reduction_are_hidden(request_, compiled):
    """But for the first input, the last output and the head's input: before the one and after these is no sublayer."""
    answer = compiled(request_)
    assert (answer.report.all_reduces, answer.report.merged) == (4 * LAYERS, 0)
    exposed = [(r.layer, r.sublayer) for r in answer.report.reductions if r.status is not Status.HIDDEN]
    assert exposed == [("0", "attention"), ("last", ""), ("last", "")], answer.verdict


@pytest.mark.parametrize("request_", STANDARD)
def test_standard_hides_nothing(request_, compiled):
    """The control."""
    found = compiled(request_).report
    assert (found.all_reduces, found.hidden) == (4 * LAYERS + 1, 0)
