"""The traits of a program that its compiler options depend on."""

import dataclasses
import enum

from ladder_jax.config import Loop, Phase


class Overlap(enum.Enum):
    """Whether a program's reductions have something to hide under: what serves one kind harms the other."""

    HIDES = "hides"  # ladder kinds
    WAITS = "waits"  # standard, parallel, desync: the fastest reduction is best, asynchronous or not


class Split(enum.Enum):
    """What beside the tensor-parallel dimensions is split, and so gathered and reduce-scattered."""

    WEIGHTS = "weights"  # over the fsdp axis
    SEQUENCE = "sequence"  # of the stream, over the tensor ranks


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the options of a program depend on, beside the device."""

    overlap: Overlap
    phase: Phase
    loop: Loop
    split: frozenset[Split] = frozenset()
