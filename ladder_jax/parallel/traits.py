"""The traits of a program that its compiler options depend on."""

import dataclasses
import enum

from ladder_jax.config import CollectiveMatmul, Launch, Loop, Phase


class Overlap(enum.Enum):
    """Whether a program's reductions can overlap compute: options that serve one kind harm the other."""

    HIDES = "hides"  # ladder kinds
    WAITS = "waits"  # standard, parallel, desync: the fastest reduction is best, asynchronous or not


class Split(enum.Enum):
    """What is split beside the tensor-parallel dimensions, and therefore gathered and reduce-scattered."""

    WEIGHTS = "weights"  # over the fsdp axis
    SEQUENCE = "sequence"  # of the stream, over the tensor ranks
    EXPERTS = "experts"  # over the tensor ranks; each gathers the rows of its own by their places
    ROWS = "rows"  # of experts, which the tensor ranks exchange


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a program's compiler options depend on, beside the device. launch: CHAINED or EXPLICIT."""

    overlap: Overlap
    phase: Phase
    loop: Loop
    split: frozenset[Split] = frozenset()
    collective_matmul: CollectiveMatmul = CollectiveMatmul.NONE
    launch: Launch = Launch.CHAINED
