"""The programs that may run a topology: how the stream lies between sublayers, and which
all-reduces they can use.
"""

import dataclasses
import enum
import functools
import itertools

from ladder_jax.config import (
    ExpertParallelism,
    Interleave,
    Launch,
    ModelConfig,
    Phase,
    parse_residual,
)
from ladder_jax.predict.machine import (
    ANY,
    FITTED,
    NCCL,
    Algorithm,
    Halves,
    Kernels,
    Ring,
)
from ladder_jax.predict.work import DENSE, MLP, Task
from ladder_jax.residual import Step, of_model


class Form(enum.Enum):
    """Where the residual stream, the weights and the batch lie."""

    ALL_REDUCE = "all-reduce"  # tensor-parallel, the whole stream on every rank
    # its positions split: a reduce-scatter and an all-gather a sublayer
    SEQUENCE_PARALLEL = "sequence-parallel"
    # sequence-parallel, in rings under the sublayer's own matmuls
    COLLECTIVE_MATMUL = "ring collective matmul"
    # sequence-parallel, and ranks exchange the rows of experts: two all-to-alls a layer
    EXCHANGE = "exchange"
    DATA_PARALLEL = "data-parallel"  # no tensor parallelism: all weights on every device
    FSDP = "fsdp"  # no tensor parallelism: each layer's weights gathered before they are used


def form_of(experts: ExpertParallelism, *, sequence_parallel: bool) -> Form:
    """Of a tensor-parallel program with these settings, without collective matmuls."""
    if experts is ExpertParallelism.EXCHANGE:
        return Form.EXCHANGE
    return Form.SEQUENCE_PARALLEL if sequence_parallel else Form.ALL_REDUCE


@dataclasses.dataclass(frozen=True)
class Program:
    """launch: how all-reduces are launched beside compute; None for topologies that wait for them.

    window: the share of a sublayer's compute that its launch leaves beside an all-reduce.
    interleave: 2 for two halves of the batch in turn.
    """

    form: Form = Form.ALL_REDUCE
    algorithms: tuple[Algorithm, ...] = FITTED
    launch: Launch | None = None
    window: float = 1.0
    interleave: int = 1


PLAIN = Program()
"""Rings and trees, with the constants that are fitted to the paper's tables."""

WINDOWS = {  # least of the chained launch, of unrolled layers: experiments/overlap; elsewhere whole
    ("NVIDIA", Phase.DECODE): 0.33,
    ("NVIDIA", Phase.PREFILL): 0.56,
    ("v5e", Phase.DECODE): 0.44,
    ("v5e", Phase.PREFILL): 0.33,
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Among which programs the fastest is taken. launch: of those that hide all-reduces.
    interleave: the whole batch, or two halves in turn where topology and phase allow it. experts:
    in which form.
    """

    launch: Launch = Launch.AUTO
    interleave: Interleave = Interleave.AUTO
    experts: ExpertParallelism = ExpertParallelism.REDUCE


def programs(task: Task, *, phase: Phase, choice: Choice) -> tuple[Program, ...]:
    """The tensor-parallel programs for a topology, at least one.

    A topology that waits for its all-reduces may use any. One that hides them may use those that
    its launch overlaps: `chained` and `explicit` what NCCL and XLA's TPU compiler do, `explicit` in
    a decode step the one-kernel algorithms too, where XLA has them: within a node. The default
    launch comes first. Two halves in turn are for every topology that reduces each output by
    itself.
    """
    config = task.model.config
    ranks = task.model.ranks
    link = task.machine.link
    block = task.block
    steps = steps_of(config)
    hides = any(step.delay for step in steps)
    in_turn = block.size > 1 and all(step.reduces and not step.early for step in steps)

    def split(form: Form) -> list[Program]:
        """A split stream has halves of rows alone."""
        found = [Program(form, launch=Launch.CHAINED if hides else None)]
        if in_turn and block.rows % 2 == 0:
            found.append(Program(form, launch=Launch.CHAINED, interleave=2))
        return found

    def launched(algorithms: tuple[Algorithm, ...], *, interleave: int = 1) -> list[Program]:
        v5e = link.halves is Halves.NONE
        kind = "NVIDIA" if link.ring is Ring.ONE_WAY else "v5e" if v5e else "TPU"
        window = WINDOWS.get((kind, phase), 1.0)
        explicit = Program(algorithms=algorithms, launch=Launch.EXPLICIT, interleave=interleave)
        chained = Program(Form.ALL_REDUCE, NCCL, Launch.CHAINED, window, interleave)
        if phase is Phase.TRAIN or v5e:
            return [chained]
        return [one for one in (explicit, chained) if choice.launch in (Launch.AUTO, one.launch)]

    if choice.experts is ExpertParallelism.EXCHANGE:
        candidates = split(Form.EXCHANGE)
    elif link is None:
        return (PLAIN,)
    else:
        candidates = [Program(algorithms=ANY)]
        if hides:
            reached = link.kernels is Kernels.XLA and link.nodes(ranks) == 1
            candidates = launched(ANY if phase is Phase.DECODE and reached else NCCL)
        if phase is not Phase.DECODE and ranks > 1:
            kind = parse_residual(config.residual).kind
            splits = int(block.tokens) % ranks == 0
            if splits and kind != "desync":
                candidates += split(Form.SEQUENCE_PARALLEL)
            if splits and kind == "standard" and config.moe is None:  # no ring brings sorted rows
                candidates.append(Program(Form.COLLECTIVE_MATMUL))
            if in_turn:
                candidates += launched(NCCL, interleave=2)
    chosen = [
        one
        for one in candidates
        if choice.interleave in (Interleave.AUTO, Interleave(one.interleave))
    ]
    return tuple(chosen or candidates)


@functools.lru_cache(maxsize=64)  # a sweep predicts the same configuration many times
def layers_of(config: ModelConfig) -> tuple[tuple[Step, ...], ...]:
    """Each layer's steps; first layers without experts have `DENSE` for `MLP`."""
    layers = list(of_model(config).layers)
    for index in range(0 if config.moe is None else config.moe.dense_layers):
        layers[index] = tuple(
            dataclasses.replace(
                step, sublayers=tuple(DENSE if one == MLP else one for one in step.sublayers)
            )
            for step in layers[index]
        )
    return tuple(layers)


def steps_of(config: ModelConfig) -> tuple[Step, ...]:
    """The topology's steps, in order."""
    return tuple(itertools.chain.from_iterable(layers_of(config)))
