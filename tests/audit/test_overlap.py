"""What the compilers for TPUs and GPUs make of the library's programs: `make audit`.

4 layers of Llama-3-70B over 8 devices; decode batch 16 at context 2048, prefill and train 1 x 1024.
Every program is compiled in a process of its own, two at a time, and kept: a second run reads what
the first compiled. For TPUs machine code is made where a test reads costs or sizes: see
test_machine_code.py.
One program a target and phase is a sample, with controls, that `make audit-sample` compiles; the
others are `full`.
"""

import dataclasses

import pytest

from ladder_jax.config import Launch, Loop, Phase, Quantize, Remat
from ladder_jax.schedule.report import Status
from tests.audit import conftest
from tests.audit.conftest import LAYERS, SERVING, check, counted

pytestmark = pytest.mark.audit

TPUS = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
ALL = (*TPUS, "h100:8", "b200:8")
WITH_HALVES = ALL[1:]
IN_HALVES = dict(interleave=2, batch=2, prompt_length=2048)
CONTROLS = [
    ("v5p:2x2x2", Phase.PREFILL),
    ("h100:8", Phase.PREFILL),
    ("tpu7x:2x2x1", Phase.DECODE),
    ("b200:8", Phase.DECODE),
]
SAMPLE = [
    *(
        dict(target=t, phase=phase, residual="ladder", loop=Loop.UNROLLED)
        for t in ALL
        for phase in SERVING
    ),
    *(
        dict(target=t, phase=Phase.TRAIN, residual="ladder", loop=Loop.SCAN, remat=Remat.NONE)
        for t in ALL
    ),
    *(
        dict(target=t, phase=phase, residual="standard", loop=Loop.UNROLLED)
        for t, phase in CONTROLS
    ),
    dict(
        target="h100:8",
        phase=Phase.DECODE,
        residual="ladder",
        loop=Loop.UNROLLED,
        launch=Launch.CHAINED,
    ),
    dict(target="v5p:2x2x2", phase=Phase.DECODE, residual="ladder", loop=Loop.SCAN),
    dict(
        target="v5p:2x2x2",
        phase=Phase.DECODE,
        residual="ladder",
        loop=Loop.SCAN,
        launch=Launch.CHAINED,
    ),
    dict(target="h100:8", phase=Phase.TRAIN, residual="standard", loop=Loop.SCAN, **IN_HALVES),
    dict(
        target="v5p:2x2x2",
        phase=Phase.PREFILL,
        residual="standard",
        loop=Loop.UNROLLED,
        **IN_HALVES,
    ),
]


def case(target, phase, residual="ladder", loop=Loop.UNROLLED, **more):
    settings = dict(target=target, phase=phase, residual=residual, loop=loop, **more)
    return conftest.case(**settings, full=settings not in SAMPLE)


SCANNED = [case(target, phase, loop=Loop.SCAN) for phase in SERVING for target in ALL]
REMAT = (Remat.NONE, Remat.FULL)
TRAIN_SCANNED = [
    case(target, Phase.TRAIN, loop=Loop.SCAN, remat=remat) for remat in REMAT for target in ALL
]
TRAIN_STANDARD = [
    case(target, Phase.TRAIN, "standard", Loop.SCAN) for target in ("tpu7x:2x2x1", "h100:8")
]
# of 16 in a training step
LEAST = {"v5e": 13, "h100": 12, "b200": 12, "v5p": 14, "v6e": 14, "tpu7x": 14}
FRESH_SCANNED = [case(target, Phase.DECODE, "ladder-fresh", Loop.SCAN) for target in ALL]
BATCH_1 = [
    case(target, Phase.DECODE, batch=1)
    for target in ("v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8")
]
INT8 = [case("h100:8", Phase.DECODE, quantize=Quantize.INT8)]
# A v5e's default: it has no halves.
CHAINED = [
    case(target, phase, loop=loop, launch=Launch.CHAINED)
    for phase in SERVING
    for loop in Loop
    for target in WITH_HALVES
]


def decoded(*targets, **settings):
    return [case(target, Phase.DECODE, **settings) for target in targets]


def served(residual):
    return [case(target, phase, residual) for phase in SERVING for target in ALL]


TWO = "v5p:2x2x2", "h100:8"
COUNTS = [
    *counted(served("ladder"), all_reduces=2 * LAYERS, hidden=2 * LAYERS - 1),
    *counted(served("standard"), all_reduces=2 * LAYERS, hidden=0),
    *counted(decoded(*ALL, residual="ladder-fresh"), all_reduces=2 * LAYERS, hidden=2 * LAYERS - 1),
    *counted(decoded(*ALL, residual="ladder-2"), all_reduces=2 * LAYERS, hidden=2 * LAYERS - 2),
    *counted(decoded(*ALL, residual="parallel-ladder"), all_reduces=LAYERS, hidden=LAYERS - 1),
    # Twice the length of each run of ladder layers, less one if it starts at layer 0: nothing is
    # pending there.
    *counted(decoded(*TWO, ladder_layers="2"), all_reduces=2 * LAYERS, hidden=4),
    *counted(decoded(*TWO, ladder_layers="0,1"), all_reduces=2 * LAYERS, hidden=3),
    *counted(decoded(*TWO, ladder_layers="0,3"), all_reduces=2 * LAYERS, hidden=3),
]
for target in ALL:
    unrolled = [case(target, Phase.TRAIN, remat=remat) for remat in REMAT]
    COUNTS += counted(unrolled, all_reduces=4 * LAYERS, hidden=LEAST[target.partition(":")[0]])


@pytest.mark.parametrize("request_, counts", COUNTS)
def test_counts(request_, counts, compiled):
    check(compiled(request_), **counts)


@pytest.mark.parametrize("request_", SCANNED + FRESH_SCANNED)
def test_scanned_ladder_hides_all_of_the_body(request_, compiled):
    answer = compiled(request_)
    check(answer, hidden=2 * LAYERS, all_reduces=2 * LAYERS + 1)  # the first turn reduces zeros
    body = [r for r in answer.report.reductions if r.collective.executions > 1]
    assert len(body) == 2 and all(r.status is Status.HIDDEN for r in body)


@pytest.mark.parametrize("request_", TRAIN_STANDARD)
def test_standard_hides_nothing_forward(request_, compiled):
    forward = [r for r in compiled(request_).report.reductions if not r.backward]
    assert sum(r.count for r in forward) == 2 * LAYERS
    assert not any(r.status is Status.HIDDEN for r in forward)


@pytest.mark.parametrize("request_", TRAIN_SCANNED)
def test_training_scanned(request_, compiled):
    body = 4 * LAYERS
    least = body if request_.remat is Remat.NONE else LEAST[request_.target.kind]
    answer = compiled(request_)
    check(answer, hidden=least, all_reduces=body + 1)
    # The embedding, the head's input, the loss's largest and sum, its target with the norm, the
    # gains' gradients.
    assert sum(one.count for one in answer.report.others) <= 6, [
        one.purpose for one in answer.report.others
    ]
    assert not any(one.purpose.startswith("other") for one in answer.report.others)


@pytest.mark.parametrize("request_", BATCH_1 + INT8)
def test_small_reductions(request_, compiled):
    """16 KiB at batch 1; on GPUs by XLA's one kernel."""
    answer = compiled(request_)
    check(answer, hidden=2 * LAYERS - 1, all_reduces=2 * LAYERS)
    assert (
        answer.record.launch == "explicit"
        and "xla_gpu_experimental_use_collective_kernels" not in answer.record.options
    )


@pytest.mark.machine_code
@pytest.mark.parametrize("request_", CHAINED)
def test_whole_windows_cost_at_most_2_percent(request_, compiled):
    """Halves, the default, against whole all-reduces that are chained: these hide as many, in
    smaller windows. In a scanned prefill on v5p 2.7 %: the compiler brings fewer operands of the
    output projections into vector memory ahead.
    """
    chained, halves = (
        compiled(request_),
        compiled(dataclasses.replace(request_, launch=Launch.AUTO)),
    )
    assert (chained.record.launch, halves.record.launch) == ("chained", "explicit")
    turns = request_.loop is Loop.SCAN
    for answer in (chained, halves):
        check(answer, hidden=2 * LAYERS - 1 + turns, all_reduces=2 * LAYERS + turns)
    assert (
        halves.report.window_flops_fraction["least"]
        >= chained.report.window_flops_fraction["least"]
    )
    if request_.target.platform == "tpu":
        scanned_prefill = (request_.target.kind, request_.phase, request_.loop) == (
            "v5p",
            Phase.PREFILL,
            Loop.SCAN,
        )
        assert (
            halves.report.step_cycles
            <= (1.03 if scanned_prefill else 1.02) * chained.report.step_cycles
        )
    else:  # no estimate ahead of time
        assert halves.bytes_accessed <= 1.02 * chained.bytes_accessed
