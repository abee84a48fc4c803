"""The programs that may run a topology: how the stream lies between sublayers, and which all-reduces they can use."""

import dataclasses
import enum
from collections.abc import Collection

from ladder_jax.config import Launch, ModelConfig, Phase, parse_residual
from ladder_jax.parallel.traits import Overlap
from ladder_jax.predict.implementation import Implementation
from ladder_jax.predict.link import FITTED, NCCL, Algorithm, Kernels
from ladder_jax.predict.machine import Machine
from ladder_jax.residual import of_model
from ladder_jax.residual.topologies import Communication


class Form(enum.Enum):
    """Where the residual stream, the weights and the batch lie."""

    ALL_REDUCE = "all-reduce"  # tensor-parallel, the whole stream on every rank
    SEQUENCE_PARALLEL = "sequence-parallel"  # its positions split: a reduce-scatter and an all-gather a sublayer
    COLLECTIVE_MATMUL = "ring collective matmul"  # sequence-parallel, in rings under the sublayer's own matmuls
    DATA_PARALLEL = "data-parallel"  # no tensor parallelism: all weights on every device
    FSDP = "fsdp"  # no tensor parallelism: each layer's weights gathered before they are used


class Opponents(enum.Enum):
    """Which programs are compared."""

    FITTED = "fitted"  # rings and trees with the constants that are fitted to the paper's tables
    NCCL = "nccl"  # all that NCCL (on TPUs: XLA) does, with the whole stream on every rank
    STRONGEST = "strongest"  # every form and algorithm that a topology may use


@dataclasses.dataclass(frozen=True)
class Program:
    """launch: how all-reduces are launched beside compute; None for topologies that wait for them."""

    form: Form = Form.ALL_REDUCE
    algorithms: tuple[Algorithm, ...] = FITTED
    launch: Launch | None = None


PLAIN = Program()


def programs(
    config: ModelConfig,
    *,
    machine: Machine,
    ranks: int,
    phase: Phase,
    tokens: int,
    implementation: Implementation,
    opponents: Opponents = Opponents.STRONGEST,
    launches: Collection[Launch] = tuple(Launch),
) -> tuple[Program, ...]:
    """The tensor-parallel programs for a topology, at least one. tokens: positions a row.

    A topology that waits for its all-reduces may use any. One that hides them may use those that its launch overlaps:
    `chained` overlaps what NCCL and XLA's TPU compiler do; `explicit` is for decoding on NVIDIA GPUs, and overlaps the
    one-kernel algorithms too, where XLA has them: within a node.
    """
    topology = of_model(config)
    if opponents is Opponents.FITTED or implementation.algorithms == FITTED:
        return (PLAIN,)
    strongest = opponents is Opponents.STRONGEST
    allowed = implementation.algorithms if strongest else NCCL
    if topology.overlap is Overlap.HIDES:
        candidates = [Program(algorithms=NCCL, launch=Launch.CHAINED)]
        if strongest and phase is Phase.DECODE and _has_kernels(machine, ranks=ranks):
            candidates.append(Program(algorithms=allowed, launch=Launch.EXPLICIT))
        candidates = [one for one in candidates if one.launch in launches] or candidates[:1]
    else:
        candidates = [Program(algorithms=allowed)]
    if strongest and phase is not Phase.DECODE and ranks > 1 and tokens % ranks == 0:
        if topology.communication is not Communication.DESYNC:
            candidates.append(Program(Form.SEQUENCE_PARALLEL, launch=candidates[0].launch))
        if parse_residual(config.residual).kind == "standard":
            candidates.append(Program(Form.COLLECTIVE_MATMUL))
    return tuple(candidates)


def _has_kernels(machine: Machine, *, ranks: int) -> bool:
    link = machine.link
    if link is None or link.kernels is not Kernels.XLA or link.nodes(ranks) > 1:
        return False
    return any(kernel is not None for kernel in (link.one_shot, link.two_shot, link.in_network))
