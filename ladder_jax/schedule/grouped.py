"""Grouped matmuls of experts in a compiled program: what of their rows and matrices a device
computes and reads.

A kernel is a custom call, by its name and its arrays, of which a text shows the sizes only:

    rows [R, I], matrices [E, I, O]  ->  [R, O]        each row times its expert's matrix
    rows [R, I], rows [R, O]         ->  [E, I, O]     a matrix's gradient: a sum over its expert's rows

R counts the rows of all ranks' experts, E the matrices of this rank's. How many of them a kernel
computes and reads is decided while it runs. Here it is what evenly loaded experts make of it, in
the mean:

    active rows      R / ranks
    read matrices    experts / ranks x (1 - (1 - k / experts)^(R / k))     those that one of R / k tokens chooses

Where XLA has no kernel, it expands: it multiplies each row with all E matrices, in a matmul that is
counted as any other.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ladder_jax.hardware import Hardware
from ladder_jax.schedule.hlo import Array, Instruction, Program

if TYPE_CHECKING:
    from ladder_jax.config import MoEConfig

KERNELS = ("ragged-dot", "ragged_dot", "grouped_matmul")
"""In the operations' names: XLA's for TPUs has its own after that of `lax.ragged_dot`."""


class Form(enum.Enum):
    """How a program computes its grouped matmuls."""

    KERNELS = "kernels"
    EXPANDED = "expanded"
    BUFFERS = "buffers"  # of exchanged rows: plain batched matmuls of as many rows for each expert


def form(program: Program) -> Form:
    """Of a program with experts: KERNELS if there are kernels, and no matmul in the place of
    one.
    """
    named = [one.opcode for one in program.instructions if _is_named(one)]
    # a CPU's have no name
    expanded = "dot" in named or "convolution" in named or "custom-call" not in named
    return Form.EXPANDED if expanded else Form.KERNELS


def _is_named(instruction: Instruction) -> bool:
    return any(name in instruction.op_name for name in KERNELS)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A model's experts over `ranks` devices. hardware: of one, for the kernels' times; None:
    unknown.
    """

    moe: MoEConfig
    ranks: int
    hardware: Hardware | None = None


@dataclasses.dataclass(frozen=True)
class Grouped:
    """One kernel.

    flops: of its rows. tiled: of all that is computed, where an expert's last tile is whole too.
    bytes: between main memory and the cores.
    """

    flops: int
    tiled: float
    bytes: float

    def seconds(self, hardware: Hardware) -> float:
        """The longer of computing and of reading, at published rates."""
        return max(self.tiled / hardware.flops, self.bytes / hardware.bandwidth)


def kernel(instruction: Instruction, *, experts: Experts | None) -> Grouped | None:
    """The grouped matmul that `instruction` is, or None. Without `experts`, all its rows and
    matrices count.
    """
    if instruction.opcode != "custom-call" or not _is_named(instruction):
        return None
    read = _floats(array for source in instruction.operands for array in source.arrays)
    written = _floats(instruction.arrays)
    rows = [one for one in read + written if len(one.dims) == 2]
    matrices = [one for one in read + written if len(one.dims) == 3]
    if not rows or not matrices:
        return None  # it finds the groups' tiles
    count = rows[0].dims[0]
    held = matrices[0].dims[0]
    active, chosen = float(count), float(held)
    if experts is not None:
        moe = experts.moe
        active = count / experts.ranks
        chosen = moe.experts / experts.ranks * moe.chosen(count / moe.top_k)
    share = lambda one: active / count if len(one.dims) == 2 else chosen / held
    moved = sum(one.in_memory * share(one) for one in read)
    # Gradients are written whole: those of experts that nobody chose are zero.
    moved += sum(one.in_memory * (share(one) if len(one.dims) == 2 else 1) for one in written)
    elements = sum(math.prod(one.dims[1:]) for one in matrices)
    # rows that are computed at once
    tile = re.search(r'ragged_dot_tiling="(\d+),', instruction.attributes)
    computed = active + chosen * (int(tile[1]) - 1 if tile else 0)
    return Grouped(round(2 * active * elements), 2 * computed * elements, moved)


def _floats(arrays: Iterable[Array]) -> list[Array]:
    """Those of floating point, or of 8 bits."""
    return [one for one in arrays if one.kind[0] in "bf" or one.kind == "s8"]
