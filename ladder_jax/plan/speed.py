"""The time of a training step, for ranking plans: microbatches as `ladder-jax predict` has them, and
what a whole step adds.

    microbatch = the pass of `predict.model.run_by`, with the recomputation of the remat policy
                 + the exposed gathers and scatters of weights split over fsdp
                   (`predict.model.split_weights`)
                 + the exposed copies to the host and back, which run beside all of it
    step       = accumulate x microbatch + the gradients' all-reduce over data + the optimizer's reads

The tensor axis lies inside a node where it can. An axis of fsdp or data whose groups span nodes has
the network's bandwidth. The axes have links of their own, so nothing of one waits for another.
"""

import dataclasses
import functools

from ladder_jax.config import Remat
from ladder_jax.hardware import HARDWARE
from ladder_jax.nn.experts import CHUNK
from ladder_jax.plan.memory import Memory
from ladder_jax.plan.request import Candidate
from ladder_jax.predict import machine as machines
from ladder_jax.predict.layers import every_kernel
from ladder_jax.predict.machine import NCCL, Link, Machine, Network
from ladder_jax.predict.model import run_by, split_weights
from ladder_jax.predict.program import Program, form_of
from ladder_jax.predict.timeline import Slot, Work, play_slots
from ladder_jax.predict.work import Recompute, Task
from ladder_jax.schedule.targets import Target

# GPUs per node, and bytes a second of each GPU between nodes: NVIDIA DGX H100 and B200 data sheets.
NODES = Network(size=8, step=0.0, bandwidth=50e9)
# Bytes a second between a device and its host, one way: https://jax-ml.github.io/scaling-book
# (tpus); PCIe 5.0 x16.
HOST = {"tpu": 16e9, "cuda": 64e9, "cpu": 16e9}

# Kernels that the backward pass repeats. Reduced sums are kept, so none that ends a sublayer is.
CHEAP = frozenset({"norm", "rotate", "attend", "activate"})  # keeping products
SUBLAYERS = CHEAP | {"query, key, value", "gate, up", "router", "sort", "experts' gate, up"}
ROUTED = frozenset({"sort", "experts' gate, up", "experts' down"})  # keeping no experts' rows


@dataclasses.dataclass(frozen=True)
class Speed:
    """The estimated speed of one step.

    seconds: total. exposed: seconds that transfers add, by waiting and by contention with compute.
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
        return machines.load(str(machines.TABLE / "nominal.yaml"))
    machine = machines.load(HARDWARE[target.kind].machine)
    network = NODES if target.platform == "cuda" else None
    return dataclasses.replace(machine, link=dataclasses.replace(machine.link, network=network))


def speed(candidate: Candidate, memory: Memory) -> Speed:
    """memory: the candidate's estimate."""
    target = candidate.request.target
    machine = machine_of(target)
    data = _link(machine, within=target.count)
    seconds, exposed = microbatch(candidate, memory)
    gradients = data.all_reduce(memory.state / 3, ranks=candidate.mesh.data)
    optimizer = machine.seconds(size=2 * memory.state)
    total = candidate.accumulate * seconds + gradients + optimizer
    forward, recomputed = flops(candidate)
    return Speed(
        total,
        candidate.accumulate * exposed + gradients,
        recomputed / (3 * forward),
        mfu=candidate.accumulate * 3 * forward / machine.flops / total,
    )


def microbatch(candidate: Candidate, memory: Memory) -> tuple[float, float]:
    """Seconds of a microbatch, and those of them that transfers add."""
    target = candidate.request.target
    machine = machine_of(target)
    model, block = candidate.microbatch
    task = Task(model, machine, block, recompute=recomputed_by(candidate))
    form = form_of(candidate.mesh.experts, sequence_parallel=candidate.sequence_parallel)
    program = Program(form, NCCL, interleave=candidate.interleave)
    one = _of_pass(task, program)
    weights = _of_weights(task, candidate.mesh.fsdp)
    copies = 2 * memory.host / HOST[target.platform]
    slot = Slot(Work(one.seconds + weights), [copies])
    whole = play_slots([slot], contention=machine.contention)
    return whole.seconds, one.exposed + weights + whole.exposed


_of_pass = functools.lru_cache(maxsize=1024)(run_by)  # the same for many meshes


@functools.lru_cache(maxsize=1024)
def _of_weights(task: Task, ranks: int) -> float:
    """Seconds that gathers and scatters of weights split over `ranks` add."""
    if ranks == 1:
        return 0.0
    link = _link(task.machine, within=ranks * task.model.ranks)
    half = functools.partial(link.half, ranks=ranks)
    return split_weights(task, half).exposed


def _link(machine: Machine, *, within: int) -> Link:
    """Of an axis whose groups lie within `within` devices: between nodes, all at the network's
    bandwidth.
    """
    link = machine.link
    if link.nodes(within) == 1:
        return link
    return dataclasses.replace(link, bandwidth=link.network.bandwidth, network=None)


def recomputed_by(candidate: Candidate) -> Recompute:
    """What the backward pass of a microbatch recomputes.

    Of a split stream every second input, a layer's last, is gathered once more. Of routed experts
    no rows are kept if there are more tokens than a chunk; their outputs are computed again for the
    gradient of the router's weights. Exchanged rows are sent once more where nothing is kept.
    """
    remat = candidate.remat
    whole = remat in (Remat.FULL, Remat.OFFLOAD)
    kernels = SUBLAYERS if whole else CHEAP if remat is Remat.SAVE_MATMULS else frozenset()
    chunked = candidate.microbatch[1].size > CHUNK and not candidate.exchanges
    return Recompute(
        kernels | ROUTED if whole or chunked else kernels,
        gathers=0.5 if candidate.sequence_parallel and remat is not Remat.NONE else 0.0,
        rows=1.0 if candidate.exchanges and whole else 0.0,
    )


def flops(candidate: Candidate) -> tuple[float, float]:
    """FLOPs of a microbatch on one device: its share of the model's forward pass, without what ranks
    add (copies of key/value heads, more padding of the vocabulary), and of recomputation in the
    backward pass; of exchanged rows without the empty slots.
    """
    model, block = candidate.microbatch
    whole = dataclasses.replace(model, ranks=1)
    repeated = recomputed_by(candidate).kernels
    forward = sum(count * kernel.flops for count, kernel in every_kernel(whole, block))
    recomputed = sum(
        count * kernel.flops
        for count, kernel in every_kernel(model, block)
        if kernel.name in repeated
    )
    return forward / model.ranks, recomputed
