"""What a compiler's options for a program depend on, and what one option is."""

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


class When(enum.Enum):
    ALWAYS = "always"
    RESCUE = "rescue"  # only after the compiler has failed without it


@dataclasses.dataclass(frozen=True)
class Option:
    """A compiler option, for which programs it is set, and where that is known from (`why`).

    split: for programs in which one of these is; empty, for all.
    """

    name: str
    value: bool | int | float | str
    why: str
    overlap: tuple[Overlap, ...] = (Overlap.HIDES,)
    phases: tuple[Phase, ...] = tuple(Phase)
    loops: tuple[Loop, ...] = tuple(Loop)
    when: When = When.ALWAYS
    split: tuple[Split, ...] = ()

    def serves(self, traits: Traits) -> bool:
        return (
            traits.overlap in self.overlap
            and traits.phase in self.phases
            and traits.loop in self.loops
            and (not self.split or not traits.split.isdisjoint(self.split))
        )
