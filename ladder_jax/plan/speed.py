"""Estimate the time of a training step, for ranking plans; simple enough to check by hand.

    microbatch = compute + exposed communication
    compute    = FLOPs / (peak x share reached) of forward, backward and recomputation, longer by
                 `contention` while a transfer is in flight
                 two halves in turn: longer as weights are read twice (predict/layers.py,
                 `together`)
    exposed    = time of the transfers beyond the compute that can hide them, plus all reductions of
                 sublayers that wait for them (standard, parallel, desync), and their all-to-alls
                 beyond a shared expert's compute
    step       = accumulate x microbatch + the gradients' all-reduce over the data axis + the optimizer's reads

The FLOPs are those of the kernels in predict/work.py, the constants those of `ladder-jax predict`
(predict/hardware). Half of an all-reduce over n ranks takes (n - 1) / n x bytes / bandwidth, an
all-to-all as in predict/machine.py, without latencies. The tensor axis is assumed to be inside a
node; an fsdp axis that spans nodes has the network's bandwidth.
"""

import dataclasses
import functools
from collections.abc import Iterable

from ladder_jax.config import ExpertParallelism, Remat
from ladder_jax.hardware import HARDWARE
from ladder_jax.nn.experts import CHUNK
from ladder_jax.plan.memory import estimate
from ladder_jax.plan.request import Candidate, Request
from ladder_jax.predict import machine as machines
from ladder_jax.predict.layers import together
from ladder_jax.predict.machine import Link, Machine, Network
from ladder_jax.predict.program import steps_of
from ladder_jax.predict.work import ATTENTION, FLOAT32, MLP, Kernel, Model
from ladder_jax.schedule import models
from ladder_jax.schedule.targets import Target

# GPUs per node, and bytes a second of each GPU between nodes: NVIDIA DGX H100 and B200 data sheets.
NODES = Network(size=8, step=0.0, bandwidth=50e9)
# Bytes a second between a device and its host, one way: https://jax-ml.github.io/scaling-book
# (tpus); PCIe 5.0 x16.
HOST = {"tpu": 16e9, "cuda": 64e9, "cpu": 16e9}
NOMINAL = dict(
    memory=0.0,
    flops=1e12,
    bandwidth=1e11,
    flops_share=1.0,
    bandwidth_share=1.0,
    launch=0.0,
    contention=0.0,
)


@dataclasses.dataclass(frozen=True)
class Speed:
    """The estimated speed of one step.

    seconds: total. exposed: seconds in which devices wait for a transfer.
    recomputed: recomputed FLOPs as a share of the model's FLOPs.
    mfu: the model's FLOPs, without recomputation, over the peak FLOPs of the devices in that time.
    """

    seconds: float
    exposed: float
    recomputed: float
    mfu: float


@functools.cache
def machine_of(target: Target) -> Machine:
    """The target's devices; of simulated ones, nominal constants."""
    if target.platform == "cpu":
        slow = Link(latency=0.0, step=0.0, bandwidth=1e10)
        return Machine("cpu", devices=target.count, link=slow, **NOMINAL)
    machine = machines.load(HARDWARE[target.kind].machine)
    network = NODES if target.platform == "cuda" else None
    return dataclasses.replace(machine, link=dataclasses.replace(machine.link, network=network))


def speed(candidate: Candidate, *, request: Request) -> Speed:
    machine = machine_of(request.target)
    mesh = candidate.mesh
    forward, recomputed = flops(candidate, request=request)
    memory = estimate(candidate, request=request)
    transfers, waiting = _transfers(candidate, request=request)
    transfers = max(transfers, 2 * memory.host / HOST[request.target.platform])

    compute = machine.seconds(flops=3 * forward + recomputed)
    if candidate.interleave == 2:
        model, _ = candidate.microbatch(request)
        weights = models.layers(request.config, ranks=mesh.tensor) * model.element_bytes
        reading = machine.seconds(size=(3 + recomputed / forward) * weights)
        compute *= 2 * together(compute / 2, reading) / together(compute, reading)
    slowed = machine.contention * min(transfers, compute)
    exposed = max(0.0, transfers - compute) + waiting
    gradients = 2 * _half(memory.state / 3, mesh.data, machine=machine, within=request.target.count)
    optimizer = machine.seconds(size=2 * memory.state)
    seconds = candidate.accumulate * (compute + slowed + exposed) + gradients + optimizer
    # without the empty slots of buffers
    reducing = dataclasses.replace(mesh, experts=ExpertParallelism.REDUCE)
    used, _ = flops(dataclasses.replace(candidate, mesh=reducing), request=request)
    mfu = candidate.accumulate * 3 * used / machine.flops / seconds
    return Speed(
        seconds, candidate.accumulate * exposed + gradients, recomputed / (3 * forward), mfu
    )


def _transfers(candidate: Candidate, *, request: Request) -> tuple[float, float]:
    """Seconds of a microbatch's transfers that compute can hide, and of those that a sublayer waits
    for.
    """
    machine = machine_of(request.target)
    mesh = candidate.mesh
    model, block = candidate.microbatch(request)
    # Two gathers in the compute dtype (forward, backward) and one reduce-scatter in float32.
    gathered = models.layers(request.config, ranks=mesh.tensor) * (
        2 * model.element_bytes + FLOAT32
    )
    weights = _half(gathered, mesh.fsdp, machine=machine, within=mesh.fsdp * mesh.tensor)
    output = _half(model.payload(block), mesh.tensor, machine=machine, within=mesh.tensor)
    hiding, waiting = (count * output for count in _halves(candidate, model))
    if candidate.exchanges:
        sent = machines.crossings(mesh.tensor, ring=machine.link.ring) * model.buffer_bytes(block)
        one = sent / _bandwidth(machine, within=mesh.tensor)
        # then nothing is hidden under a standard layer's own shared expert
        in_turn = candidate.interleave == 2
        shared = 0.0 if in_turn else machine.seconds(flops=_total(model.shared_expert(block)))
        of_rows = _all_to_alls(candidate, model, seconds=one, shared=shared)
        hiding += of_rows[0]
        waiting += of_rows[1]
    if candidate.interleave == 2:  # each beside the other half's sublayer
        hiding += waiting
        waiting = 0.0
    return weights + hiding, waiting


def _half(size: float, ranks: int, *, machine: Machine, within: int) -> float:
    """Seconds of an all-gather or a reduce-scatter over `ranks` ranks within a group of `within`
    devices.
    """
    return (ranks - 1) / ranks * size / _bandwidth(machine, within=within)


def _bandwidth(machine: Machine, *, within: int) -> float:
    """Of the link, or of the network, for a group of `within` devices."""
    link = machine.link
    return link.bandwidth if link.nodes(within) == 1 else link.network.bandwidth


def _halves(candidate: Candidate, model: Model) -> tuple[float, float]:
    """Numbers of the layers' gathers and reduce-scatters: those that a sublayer can hide, those
    that one waits for.
    """
    # A reduction is two halves forward and two backward. With recomputation the second input is
    # gathered once more.
    each = 4.5 if candidate.sequence_parallel and candidate.remat is not Remat.NONE else 4
    shared = 1.0 if not candidate.exchanges or model.config.moe.shared_width else 0.0
    hiding = waiting = 0.0
    for step in steps_of(model.config):
        # Exchanged experts reduce no sum but a shared expert's, which farskip adds to attention's.
        share = (
            1.0
            if ATTENTION in step.sublayers
            else 0.5 * shared
            if candidate.exchanges and step.early
            else shared
        )
        if step.reduces and step.delay:
            hiding += each * share
        elif step.reduces:
            waiting += each * share
    return hiding, waiting


def _all_to_alls(
    candidate: Candidate, model: Model, *, seconds: float, shared: float
) -> tuple[float, float]:
    """Seconds of a microbatch's all-to-alls that sublayers can hide, and of those that they wait
    for.

    A layer has two forward and two backward, and two more where they are repeated. In a standard
    layer they stand beside the shared expert. seconds: of one. shared: of the shared expert's
    products, forward.
    """
    repeats = candidate.remat in (Remat.FULL, Remat.OFFLOAD)
    delays = [
        step.delay
        for step in steps_of(model.config)
        if ATTENTION not in step.sublayers and step.reduces
    ]
    each = (6 if repeats else 4) * seconds
    hiding = sum(delay > 0 for delay in delays)
    return hiding * each, (len(delays) - hiding) * max(0.0, each - (4 if repeats else 3) * shared)


def flops(candidate: Candidate, *, request: Request) -> tuple[float, float]:
    """FLOPs of a microbatch on one device: of the forward pass, and of recomputation in the
    backward pass.

    Reduced sums are kept, so what a sublayer's last product computes is not recomputed, but for
    exchanged experts. Of routed experts no rows are kept if there are more tokens than a chunk.
    """
    model, block = candidate.microbatch(request)
    forward = _total(model.ends(block))
    recomputed = 0.0
    for count, config in models.kinds(request.config):
        layer = dataclasses.replace(model, config=config)
        routed = layer.routed(block, exchanged=candidate.exchanges) if config.moe else []
        others = [*layer.step((ATTENTION,), block)]
        others += layer.shared_expert(block) if config.moe else layer.step((MLP,), block)
        every = [*routed, *others]
        if candidate.remat in (Remat.FULL, Remat.OFFLOAD):
            again = _total(every) - _total(others if candidate.exchanges else every, "out", "down")
        else:
            chunks = block.size > CHUNK and not candidate.exchanges
            again = _total(routed, "gate, up", "down") if chunks else 0.0
            again += _total(every, "attend") if candidate.remat is Remat.SAVE_MATMULS else 0.0
        forward += count * _total(every)
        recomputed += count * again
    return forward, recomputed


def _total(kernels: Iterable[Kernel], *names: str) -> float:
    """Their FLOPs; of those of these names, if any."""
    return sum(kernel.flops for kernel in kernels if not names or kernel.name in names)
