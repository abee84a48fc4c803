"""Estimate the time of a training step, for ranking plans; simple enough to check by hand.

    microbatch = compute + exposed communication
    compute    = FLOPs / (peak x share reached) of forward, backward and recomputation, longer by `contention` while
                 a transfer is in flight
                 two halves in turn: longer as weights are read twice (predict/layers.py, `together`)
    exposed    = time of the transfers beyond the compute that can hide them, plus all reductions of sublayers that
                 wait for them (standard, parallel, desync), and their all-to-alls beyond a shared expert's compute
    step       = accumulate x microbatch + the gradients' all-reduce over the data axis + the optimizer's reads

The constants are those of `ladder-jax predict` (predict/hardware). Half of an all-reduce over n ranks takes
(n - 1) / n x bytes / bandwidth, an all-to-all as in predict/link.py, without latencies. The tensor axis is assumed to
be inside a node; an fsdp axis that spans nodes has the network's bandwidth.
"""

import dataclasses

from ladder_jax import residual
from ladder_jax.config import ExpertParallelism, ModelConfig, Remat
from ladder_jax.hardware import HARDWARE
from ladder_jax.nn.experts import CHUNK
from ladder_jax.plan import exchange
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.memory import estimate
from ladder_jax.plan.request import FLOAT32, Request, size_of
from ladder_jax.predict import link
from ladder_jax.predict import machine as machines
from ladder_jax.predict.layers import together
from ladder_jax.predict.link import Ring
from ladder_jax.predict.machine import Machine
from ladder_jax.schedule import shards

# GPUs per node, and bytes a second of each GPU between nodes: NVIDIA DGX H100 and B200 data sheets.
NODE, NETWORK = 8, 50e9
# Bytes a second between a device and its host, one way: https://jax-ml.github.io/scaling-book (tpus); PCIe 5.0 x16.
HOST = {"tpu": 16e9, "cuda": 64e9, "cpu": 16e9}
NOMINAL = dict(flops=1e12, bandwidth=1e11, link=1e10)  # for simulated devices


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


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of one device, a second.

    flops: reached. peak: published FLOPs. memory, link, network, host: bytes of memory traffic, of the link inside a
    node, of the network between nodes, of the connection to the host. node: devices per node. ring: whether the link is
    a torus.
    """

    flops: float
    peak: float
    memory: float
    link: float
    network: float
    node: int
    host: float
    contention: float
    ring: Ring = Ring.ONE_WAY


def rates(request: Request) -> Rates:
    target = request.target
    host = HOST[target.platform]
    if target.platform == "cpu":
        slow = NOMINAL["link"]
        return Rates(NOMINAL["flops"], NOMINAL["flops"], NOMINAL["bandwidth"], slow, slow, target.count, host, 0.0)
    machine: Machine = machines.load(HARDWARE[target.kind].machine)
    gpu = target.platform == "cuda"
    return Rates(
        flops=machine.flops * machine.flops_share,
        peak=machine.flops,
        memory=machine.bandwidth * machine.bandwidth_share,
        link=machine.link.bandwidth,
        network=NETWORK if gpu else machine.link.bandwidth,
        node=NODE if gpu else target.count,
        host=host,
        contention=machine.contention,
        ring=machine.link.ring,
    )


def speed(candidate: Candidate, *, request: Request) -> Speed:
    rate, mesh, config = rates(request), candidate.mesh, request.config
    forward, recomputed = _flops(candidate, request=request)
    memory, size = estimate(candidate, request=request), size_of(config.dtype)

    def half(bytes_: float, ranks: int, *, within: int) -> float:
        """Seconds of an all-gather or a reduce-scatter over `ranks` ranks within a group of `within` devices."""
        return (ranks - 1) / ranks * bytes_ / (rate.link if within <= rate.node else rate.network)

    # Two gathers in the compute dtype (forward, backward) and one reduce-scatter in float32.
    matrices = shards.layers(config, ranks=mesh.tensor)
    weights = half(matrices * (2 * size + FLOAT32), mesh.fsdp, within=mesh.fsdp * mesh.tensor)
    output = half(candidate.rows * request.sequence * config.d_model * size, mesh.tensor, within=mesh.tensor)
    hiding, waiting = (count * output for count in _halves(candidate, config))
    if candidate.exchanges:
        bandwidth = rate.link if mesh.tensor <= rate.node else rate.network
        sent = link.crossings(mesh.tensor, ring=rate.ring) * exchange.sent(candidate, request=request) / bandwidth
        of_rows = exchange.seconds(candidate, request=request, all_to_all=sent, flops=rate.flops)
        hiding, waiting = hiding + of_rows[0], waiting + of_rows[1]
    if candidate.interleave == 2:  # each beside the other half's sublayer
        hiding, waiting = hiding + waiting, 0.0
    transfers = max(weights + hiding, 2 * memory.host / rate.host)

    compute = (3 * forward + recomputed) / rate.flops
    if candidate.interleave == 2:
        reading = (3 + recomputed / forward) * matrices * size / rate.memory
        compute *= 2 * together(compute / 2, reading) / together(compute, reading)
    slowed = rate.contention * min(transfers, compute)
    exposed = max(0.0, transfers - compute) + waiting
    gradients = 2 * half(memory.state / 3, mesh.data, within=request.target.count)
    seconds = candidate.accumulate * (compute + slowed + exposed) + gradients + 2 * memory.state / rate.memory
    used = _flops(_reducing(candidate), request=request)[0]  # without the empty slots of buffers
    mfu = candidate.accumulate * 3 * used / rate.peak / seconds
    return Speed(seconds, candidate.accumulate * exposed + gradients, recomputed / (3 * forward), mfu)


def _reducing(candidate: Candidate) -> Candidate:
    return dataclasses.replace(candidate, mesh=dataclasses.replace(candidate.mesh, experts=ExpertParallelism.REDUCE))


def _halves(candidate: Candidate, config: ModelConfig) -> tuple[float, float]:
    """Numbers of the layers' gathers and reduce-scatters: those that a sublayer can hide, those that one waits for."""
    steps = [step for layer in residual.of_model(config).layers for step in layer]
    reducing = [step for step in steps if step.reduces]
    # A reduction is two halves forward and two backward. With recomputation the second input is gathered once more.
    regathers = candidate.sequence_parallel and candidate.remat is not Remat.NONE
    each = 4.5 if regathers else 4
    count = lambda step: each * (exchange.reductions(step, config) if candidate.exchanges else 1)
    hiding = sum(count(step) for step in reducing if step.delay)
    return hiding, sum(map(count, reducing)) - hiding


def _flops(candidate: Candidate, *, request: Request) -> tuple[float, float]:
    """FLOPs of a microbatch on one device: of the forward pass, and of recomputation in the backward pass."""
    config, tensor = request.config, candidate.mesh.tensor
    shard = shards.shard(config, ranks=tensor)
    tokens, heads = candidate.rows * request.sequence, config.num_heads / tensor
    scores = 2 * candidate.rows * heads * config.head_dim * request.sequence * (request.sequence + 1)
    active, again = shards.active_layers(config, ranks=tensor), _experts_again(config, tokens=tokens, ranks=tensor)
    written = sum(count * shards.shard(kind, ranks=tensor).active for count, kind in shards.kinds(config))
    if candidate.exchanges:
        multiplications, columns = exchange.products(candidate, request=request)
        active, again = config.num_layers * (shard.attention + multiplications / tokens), 0.0
        written = config.num_layers * columns
    layers = 2 * tokens * active + config.num_layers * scores
    head = 2 * tokens * shard.vocabulary * config.d_model
    # The reduced sums are kept, so the output projections of both sublayers are not recomputed.
    outputs = 2 * tokens * config.d_model * (config.num_layers * shard.queries + written)
    recomputed = {
        Remat.NONE: again,
        Remat.SAVE_MATMULS: config.num_layers * scores + again,
        Remat.FULL: layers - outputs,
        Remat.OFFLOAD: layers - outputs,
    }
    return layers + head, recomputed[candidate.remat]


def _experts_again(config: ModelConfig, *, tokens: int, ranks: int) -> float:
    """FLOPs of the routed experts if there are more tokens than a chunk: of these no rows are kept."""
    if config.moe is None or tokens <= CHUNK:
        return 0.0
    layers = config.num_layers - config.moe.dense_layers
    return layers * 2 * tokens * 3 * config.d_model * config.moe.top_k * config.moe.expert_width / ranks
