"""How long a training step takes, by a model coarse enough to be checked by hand: what plans are ranked by.

    a microbatch = compute + exposed communication
    compute      = FLOPs / (peak x share reached), forward, backward and what the remat policy computes again,
                   longer by `contention` while a transfer is in flight
    exposed      = what of the transfers is longer than the compute that they stand beside; of a topology whose
                   sublayers wait for their reductions (standard, parallel, desync) all of these
    a step       = accumulate x a microbatch + the gradients' all-reduce over the data axis + the optimizer's reads

Constants are those of `ladder-jax predict` (predict/hardware); a half of an all-reduce, n ranks, takes
(n - 1) / n x bytes / bandwidth. A tensor axis is taken to lie within a node; an fsdp axis that does not fit in it
moves at the network's speed.
"""

import dataclasses

from ladder_jax import residual
from ladder_jax.config import ModelConfig, Remat
from ladder_jax.plan.candidate import Candidate
from ladder_jax.plan.memory import FLOAT32, estimate, size_of
from ladder_jax.plan.request import Request
from ladder_jax.predict import machine as machines
from ladder_jax.predict.machine import Machine
from ladder_jax.residual import Silent
from ladder_jax.schedule import shards

MACHINES = {"h100": "h100-2-nodes", "b200": "b200-nvlink"}  # others by their own name
NODE, NETWORK = 8, 50e9  # GPUs, and bytes a second of each beyond: NVIDIA DGX H100 and B200 data sheets
# Bytes a second to a device's host, one way: https://jax-ml.github.io/scaling-book (tpus); PCIe 5.0 x16.
HOST = {"tpu": 16e9, "cuda": 64e9, "cpu": 16e9}
NOMINAL = dict(flops=1e12, bandwidth=1e11, link=1e10)  # of a simulated device, which has no speed of its own


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of one step: `seconds` in all, of which `exposed` devices wait for a transfer.

    recomputed: FLOPs of the backward pass that the forward pass has computed before, as a share of the model's.
    mfu: the model's FLOPs over what the devices could do in that time, none recomputed counted.
    """

    seconds: float
    exposed: float
    recomputed: float
    mfu: float


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one device: FLOPs reached and at its peak, bytes of memory, of links inside a node, beyond it, to the host."""

    flops: float
    peak: float
    memory: float
    link: float
    network: float
    node: int
    host: float
    contention: float


def rates(request: Request) -> Rates:
    target = request.target
    host = HOST[target.platform]
    if target.platform == "cpu":
        slow = NOMINAL["link"]
        return Rates(NOMINAL["flops"], NOMINAL["flops"], NOMINAL["bandwidth"], slow, slow, target.count, host, 0.0)
    found: Machine = machines.load(MACHINES.get(target.kind, target.kind))
    gpu = target.platform == "cuda"
    return Rates(
        flops=found.flops * found.flops_share,
        peak=found.flops,
        memory=found.bandwidth * found.bandwidth_share,
        link=found.link.bandwidth,
        network=NETWORK if gpu else found.link.bandwidth,
        node=NODE if gpu else target.count,
        host=host,
        contention=found.contention,
    )


def speed(candidate: Candidate, *, request: Request) -> Speed:
    rate, mesh, config = rates(request), candidate.mesh, request.config
    forward, again = _flops(candidate, request=request)
    held = shards.shard(config, ranks=mesh.tensor)
    taken, size = estimate(candidate, request=request), size_of(config.dtype)

    def half(bytes_: float, ranks: int, *, within: int) -> float:
        """Seconds of an all-gather or a reduce-scatter over ranks that span `within` devices."""
        return (ranks - 1) / ranks * bytes_ / (rate.link if within <= rate.node else rate.network)

    # Forward and backward: gathered in the compute dtype twice, given back in float32 once.
    matrices = config.num_layers * (held.attention + held.mlp)
    weights = half(matrices * (2 * size + FLOAT32), mesh.fsdp, within=mesh.fsdp * mesh.tensor)
    # A reduction is two halves forward and two backward; what is computed again gathers its second input again.
    gathered_again = candidate.sequence_parallel and candidate.remat is not Remat.NONE
    output = half(candidate.rows * request.sequence * config.d_model * size, mesh.tensor, within=mesh.tensor)
    hiding, waiting = (count * (4.5 if gathered_again else 4) * output for count in _reductions(config))
    beside = max(weights + hiding, 2 * taken.host / rate.host)

    compute = (3 * forward + again) / rate.flops
    slowed = rate.contention * min(beside, compute)
    exposed = max(0.0, beside - compute) + waiting
    gradients = 2 * half(taken.state / 3, mesh.data, within=request.target.count)
    seconds = candidate.accumulate * (compute + slowed + exposed) + gradients + 2 * taken.state / rate.memory
    mfu = candidate.accumulate * 3 * forward / rate.peak / seconds
    return Speed(seconds, candidate.accumulate * exposed + gradients, again / (3 * forward), mfu)


def _reductions(config: ModelConfig) -> tuple[int, int]:
    """How many of the layers' reductions stand beside a sublayer, and how many are waited for."""
    steps = [step for layer in residual.of_model(config).layers for step in layer]
    reducing = [step for step in steps if not isinstance(step, Silent) and getattr(step, "sync", True)]
    hiding = sum(step.delay > 0 for step in reducing)
    return hiding, len(reducing) - hiding


def _flops(candidate: Candidate, *, request: Request) -> tuple[float, float]:
    """Of a microbatch on one device: forward, and computed again in the backward pass."""
    config, tensor = request.config, candidate.mesh.tensor
    held = shards.shard(config, ranks=tensor)
    tokens, heads = candidate.rows * request.sequence, config.num_heads / tensor
    scores = 2 * candidate.rows * heads * config.head_dim * request.sequence * (request.sequence + 1)
    layers = config.num_layers * (2 * tokens * (held.attention + held.mlp) + scores)
    head = 2 * tokens * held.vocabulary * config.d_model
    last = config.num_layers * 2 * tokens * config.d_model * (held.queries + held.features)
    # The reduced sums are kept, so the two matmuls that make them are not computed again.
    again = {
        Remat.NONE: 0.0,
        Remat.SAVE_MATMULS: config.num_layers * scores,
        Remat.FULL: layers - last,
        Remat.OFFLOAD: layers - last,
    }
    return layers + head, again[candidate.remat]
