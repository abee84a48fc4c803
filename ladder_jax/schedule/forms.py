"""Find where a scheduled program issues and awaits each collective, in every form that XLA writes.

all-reduce                                   synchronous, on every backend; likewise the other kinds
all-reduce-start ... all-reduce-done         NVIDIA GPU; likewise the other kinds
async-start ... async-done, fusion-start ... fusion-done
                                             NVIDIA GPU, the collective in the called computation
call-start, call-update ... call-done        TPU SparseCore; the start may come early, without
                                             operands, so the window starts at the update
fusion(AsyncCollectiveStart) ... fusion(AsyncCollectiveDone)
                                             TPU v5e; pieces of one collective share a chain_id,
                                             and pieces fused with compute are in the window
"""

import dataclasses
import re
from collections.abc import Iterator

from ladder_jax.schedule.hlo import Computation, Instruction, Program

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
CONTROL_FLOW = ("while", "call", "conditional")


def scheduled(program: Program) -> list[Computation]:
    """The computations whose instructions the device issues in order: the entry, loop bodies, branches."""
    order = []

    def visit(computation: Computation):
        if computation in order:
            return
        order.append(computation)
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                for name in instruction.calls:
                    visit(program.computations[name])

    visit(program.entry)
    return order


@dataclasses.dataclass(frozen=True)
class Form:
    """A collective, the computation that holds it, and the positions of its start and its done."""

    collective: Instruction
    holder: Computation
    issued: int
    awaited: int


def forms(computation: Computation, program: Program) -> Iterator[Form]:
    instructions = computation.instructions
    for index, instruction in enumerate(instructions):
        if instruction.opcode in CONTROL_FLOW:
            continue
        start_of = re.fullmatch(r"(.+)-start", instruction.opcode)
        if instruction.opcode in KINDS:
            yield Form(instruction, computation, index, index)
        elif start_of and start_of[1] in KINDS:
            yield Form(instruction, computation, index, _done_of(instructions, index, start_of[1]))
        elif inner := _called_collective(instruction, program):
            if start_of:
                start = _last_update(instructions, index, start_of[1])
                yield Form(*inner, start, _done_of(instructions, start, start_of[1]))
            elif _calls_target(instruction, program, "AsyncCollectiveStart"):
                yield Form(*inner, index, _chained_done(instructions, index, inner[0], program))
            elif instruction.opcode == "fusion" and "chain_id=" not in inner[0].attributes:
                yield Form(*inner, index, index)


def _called_collective(instruction: Instruction, program: Program) -> tuple[Instruction, Computation] | None:
    """The collective in the computations that `instruction` calls."""
    for name in instruction.calls:
        holder = program.computations[name]
        for inner in holder.instructions:
            if inner.opcode in KINDS:
                return inner, holder
            if deeper := _called_collective(inner, program):
                return deeper
    return None


def _last_update(instructions: tuple[Instruction, ...], start: int, stem: str) -> int:
    """Position of the last update of the start at `start`; `start` itself if it has none."""
    while True:
        name = instructions[start].name
        later = (i for i in range(start + 1, len(instructions)) if instructions[i].opcode == f"{stem}-update")
        update = next((i for i in later if name in instructions[i].operands), None)
        if update is None:
            return start
        start = update


def _done_of(instructions: tuple[Instruction, ...], start: int, stem: str) -> int:
    name = instructions[start].name
    for index in range(start + 1, len(instructions)):
        if instructions[index].opcode == f"{stem}-done" and name in instructions[index].operands:
            return index
    raise ValueError(f"the schedule starts {name} and never awaits it")


def _chained_done(instructions: tuple[Instruction, ...], start: int, piece: Instruction, program: Program) -> int:
    chain = re.search(r'chain_id="?(\d+)', piece.attributes)
    for index in range(start + 1, len(instructions)):
        if _calls_target(instructions[index], program, "AsyncCollectiveDone"):
            inner = _called_collective(instructions[index], program)
            if inner and chain and re.search(rf'chain_id="?{chain[1]}\b', inner[0].attributes):
                return index
    raise ValueError(f"the schedule starts {instructions[start].name} and never awaits it")


def _calls_target(instruction: Instruction, program: Program, target: str) -> bool:
    return instruction.opcode == "fusion" and any(
        f'custom_call_target="{target}"' in inner.attributes
        for name in instruction.calls
        for inner in program.computations[name].instructions
    )
