"""The programs that may run a topology: how the stream lies between sublayers, and which all-reduces they can use."""

import dataclasses
import enum
from collections.abc import Collection

from ladder_jax.config import ExpertParallelism, Launch, ModelConfig, Phase, parse_residual
from ladder_jax.parallel.compiler_options import Overlap
from ladder_jax.predict.implementation import Implementation
from ladder_jax.predict.link import FITTED, NCCL, Algorithm, Halves, Kernels, Ring
from ladder_jax.predict.machine import Machine
from ladder_jax.residual import Topology, of_model
from ladder_jax.residual.topologies import Communication


class Form(enum.Enum):
    """Where the residual stream, the weights and the batch lie."""

    ALL_REDUCE = "all-reduce"  # tensor-parallel, the whole stream on every rank
    SEQUENCE_PARALLEL = "sequence-parallel"  # its positions split: a reduce-scatter and an all-gather a sublayer
    COLLECTIVE_MATMUL = "ring collective matmul"  # sequence-parallel, in rings under the sublayer's own matmuls
    EXCHANGE = "exchange"  # sequence-parallel, and ranks exchange the rows of experts: two all-to-alls a layer
    DATA_PARALLEL = "data-parallel"  # no tensor parallelism: all weights on every device
    FSDP = "fsdp"  # no tensor parallelism: each layer's weights gathered before they are used


class Opponents(enum.Enum):
    """Which programs are compared."""

    FITTED = "fitted"  # rings and trees with the constants that are fitted to the paper's tables
    NCCL = "nccl"  # all that NCCL (on TPUs: XLA) does, with the whole stream on every rank
    STRONGEST = "strongest"  # every form and algorithm that a topology may use


@dataclasses.dataclass(frozen=True)
class Program:
    """launch: how all-reduces are launched beside compute; None for topologies that wait for them.

    window: the share of a sublayer's compute that its launch leaves beside an all-reduce. interleave: 2 for two halves
    of the batch in turn.
    """

    form: Form = Form.ALL_REDUCE
    algorithms: tuple[Algorithm, ...] = FITTED
    launch: Launch | None = None
    window: float = 1.0
    interleave: int = 1


PLAIN = Program()

WINDOWS = {  # least of the chained launch, of unrolled layers: experiments/overlap; elsewhere whole
    ("NVIDIA", Phase.DECODE): 0.33,
    ("NVIDIA", Phase.PREFILL): 0.56,
    ("v5e", Phase.DECODE): 0.44,
    ("v5e", Phase.PREFILL): 0.33,
}


def programs(
    config: ModelConfig,
    *,
    machine: Machine,
    ranks: int,
    phase: Phase,
    rows: int,
    tokens: int,
    implementation: Implementation,
    opponents: Opponents = Opponents.STRONGEST,
    launches: Collection[Launch] = tuple(Launch),
    interleaves: Collection[int] = (1, 2),
    experts: ExpertParallelism = ExpertParallelism.REDUCE,
) -> tuple[Program, ...]:
    """The tensor-parallel programs for a topology, at least one. tokens: positions a row. experts: in which form.
    interleaves: the whole batch (1), two halves in turn (2), where the topology and the phase allow it.

    A topology that waits for its all-reduces may use any. One that hides them may use those that its launch overlaps:
    `chained` and `explicit` what NCCL and XLA's TPU compiler do, `explicit` in a decode step the one-kernel algorithms
    too, where XLA has them: within a node. The default launch comes first.
    """
    topology = of_model(config)
    hides = topology.overlap is Overlap.HIDES
    if experts is ExpertParallelism.EXCHANGE:
        return (Program(Form.EXCHANGE, launch=Launch.CHAINED if hides else None),)
    if opponents is Opponents.FITTED or implementation.algorithms == FITTED:
        return (PLAIN,)
    strongest = opponents is Opponents.STRONGEST
    allowed = implementation.algorithms if strongest else NCCL
    if hides:
        candidates = [Program(algorithms=NCCL, launch=Launch.CHAINED, window=_chained_window(machine, phase))]
        if phase is not Phase.TRAIN and machine.link is not None and machine.link.halves is Halves.SUPPORTED:
            kernels = strongest and phase is Phase.DECODE and _has_kernels(machine, ranks=ranks)
            candidates.insert(0, Program(algorithms=allowed if kernels else NCCL, launch=Launch.EXPLICIT))
        candidates = [one for one in candidates if one.launch in launches] or candidates[:1]
    else:
        candidates = [Program(algorithms=allowed)]
    splits = strongest and phase is not Phase.DECODE and ranks > 1 and tokens % ranks == 0
    if splits:
        if topology.communication is not Communication.DESYNC:
            candidates.append(Program(Form.SEQUENCE_PARALLEL, launch=Launch.CHAINED if hides else None))
        if parse_residual(config.residual).kind == "standard" and config.moe is None:  # no ring brings sorted rows
            candidates.append(Program(Form.COLLECTIVE_MATMUL))
    halves = _in_halves(topology, machine=machine, phase=phase, launches=launches, sequence_parallel=splits)
    if not strongest or ranks == 1 or rows * tokens == 1 or phase is Phase.DECODE:
        halves = []
    chosen = [one for one in (*candidates, *halves) if one.interleave in interleaves]
    return tuple(chosen or candidates)


def _in_halves(
    topology: Topology, *, machine: Machine, phase: Phase, launches: Collection[Launch], sequence_parallel: bool
) -> list[Program]:
    """The programs of two halves in turn: for every topology that reduces each output by itself."""
    steps = [step for layer in topology.layers for step in layer]
    if not all(step.reduces and not step.early for step in steps):
        return []
    of_halves = Program(algorithms=NCCL, interleave=2)
    chained = dataclasses.replace(of_halves, launch=Launch.CHAINED, window=_chained_window(machine, phase))
    programs = [chained]
    if phase is Phase.PREFILL and machine.link is not None and machine.link.halves is Halves.SUPPORTED:
        programs.insert(0, dataclasses.replace(of_halves, launch=Launch.EXPLICIT))
    programs = [one for one in programs if one.launch in launches] or programs[:1]
    if sequence_parallel:
        programs.append(Program(Form.SEQUENCE_PARALLEL, launch=Launch.CHAINED, interleave=2))
    return programs


def decoding_in_halves(*, rows: int, ranks: int, implementation: Implementation) -> list[Program]:
    """Standard's decode step in two halves of its rows, as other frameworks have it; this library has none."""
    if rows == 1 or ranks == 1 or implementation.algorithms == FITTED:
        return []
    return [Program(algorithms=implementation.algorithms, interleave=2)]


def _chained_window(machine: Machine, phase: Phase) -> float:
    if machine.link is None:
        return 1.0
    kind = "NVIDIA" if machine.link.ring is Ring.ONE_WAY else "v5e" if machine.link.halves is Halves.NONE else "TPU"
    return WINDOWS.get((kind, phase), 1.0)


def _has_kernels(machine: Machine, *, ranks: int) -> bool:
    link = machine.link
    if link is None or link.kernels is not Kernels.XLA or link.nodes(ranks) > 1:
        return False
    return any(kernel is not None for kernel in (link.one_shot, link.two_shot, link.in_network))
