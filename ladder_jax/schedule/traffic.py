"""How many bytes a scheduled program moves between a device's main memory and its cores.

XLA's own `bytes accessed` counts every operand of every instruction: a matrix that is prefetched into
on-chip memory three times, a kernel's operands not at all or as its author declared. Here an array
counts where it lies in main memory, as often as the program reads or writes it there.
"""

import math
import re

from ladder_jax.schedule.cost import token_loop, trip_count, turns
from ladder_jax.schedule.hlo import Computation, Instruction, Program, size_in_bytes

# What moves nothing: names for arrays that are already there, and the ends of what was counted at its start.
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier"
    " copy-done slice-done call-done async-done all-reduce-done all-gather-done collective-permute-done".split()
)
_VIEWS = ("bitcast", "convert", "reshape", "copy", "transpose")
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")  # a layout's memory space; none or S(0) is main memory


def bytes_moved(program: Program) -> int:
    """Read and written in one execution, loops as often as they turn; of a conditional, its largest branch.

    Of a program that makes several tokens, a token's share: a turn of the loop over them, and as large a part of what
    is done once before and after it, as of arrays that stay on the chip throughout.
    """
    entry, loop = program.entry, token_loop(program)
    total = _computation(entry, program)
    if loop is None:
        return total
    inside = _instruction(loop, entry, program)
    return inside + (total - inside) // turns(loop, within=entry, program=program)


def _computation(computation: Computation, program: Program) -> int:
    return sum(_instruction(i, computation, program) for i in computation.instructions)


def _instruction(instruction: Instruction, within: Computation, program: Program) -> int:
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    below = [program.computations[name] for name in instruction.calls]
    if instruction.opcode == "while":
        turns = trip_count(instruction, within=within, program=program)
        return turns * sum(_computation(one, program) for one in below)
    if instruction.opcode == "conditional":
        return max(_computation(one, program) for one in below)
    if instruction.opcode in ("call", "async-start", "call-start", "async-update", "call-update"):
        return sum(_computation(one, program) for one in below)
    operands = [within.by_name[name] for name in instruction.operands]
    if instruction.opcode == "fusion":
        return _fusion(instruction, operands, below[0])
    if instruction.opcode in _PARTIAL:
        read, written = _PARTIAL[instruction.opcode](instruction, operands)
        return read + written
    if instruction.opcode in ("copy-start", "slice-start"):
        ends = _arrays(instruction)[:2]  # from and to, in either order; a slice reads no more than it keeps
        return min(size for _, size in ends) * sum(not on_chip for on_chip, _ in ends)
    if instruction.opcode.endswith("-start"):  # of a collective; its tuple names the operands again
        return 2 * sum(map(_in_memory, operands))
    return sum(map(_in_memory, operands)) + _in_memory(instruction)


def _fusion(fusion: Instruction, operands: list[Instruction], body: Computation) -> int:
    parameters = {int(i.literal or 0): i for i in body.instructions if i.opcode == "parameter"}
    read = sum(_read(parameters[n], body, _in_memory(operand)) for n, operand in enumerate(operands))
    root = body.instructions[-1]
    roots = [body.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written = sum(
        min(_written(one, body), size) if not on_chip else 0 for one, (on_chip, size) in zip(roots, _arrays(fusion))
    )
    return read + written


def _read(array: Instruction, body: Computation, whole: int) -> int:
    """Bytes of a parameter, `whole` in memory, that its users in a fusion read."""
    total = 0
    for user in body.instructions:
        if array.name not in user.operands:
            continue
        if user.opcode in _VIEWS:
            total += _read(user, body, whole)
        elif user.opcode in _PARTIAL and user.operands[0] == array.name:
            total += _PARTIAL[user.opcode](user, [body.by_name[name] for name in user.operands])[0]
        else:
            return whole
        if total >= whole:
            return whole
    return total


def _written(array: Instruction, body: Computation) -> float:
    while array.opcode in _VIEWS:
        array = body.by_name[array.operands[0]]
    if array.opcode in ("dynamic-update-slice", "scatter"):
        return _PARTIAL[array.opcode](array, [body.by_name[name] for name in array.operands])[1]
    return math.inf


# (read, written) of what touches a part of its first operand only. An update happens in place: it reads
# nothing of what it overwrites.
_PARTIAL = {
    "dynamic-slice": lambda i, operands: (_size(i), _in_memory(i)),
    "slice": lambda i, operands: (_size(i), _in_memory(i)),
    "gather": lambda i, operands: (_size(i), _in_memory(i)),
    "dynamic-update-slice": lambda i, operands: (0, _size(operands[1])),
    "scatter": lambda i, operands: (0, _size(operands[2])),
}


def _size(instruction: Instruction) -> int:
    return size_in_bytes(instruction.arrays)


def _arrays(instruction: Instruction) -> list[tuple[bool, int]]:
    """(whether it is on the chip, bytes) of each array of the result."""
    layouts = re.findall(r"\b[a-z]\w*\[[\d,]*\](\{[^}]*\})?", instruction.shape)
    return [
        (bool(_ON_CHIP.search(layout)), size_in_bytes((array,)))
        for array, layout in zip(instruction.arrays, layouts, strict=True)
    ]


def _in_memory(instruction: Instruction) -> int:
    return sum(size for on_chip, size in _arrays(instruction) if not on_chip)
