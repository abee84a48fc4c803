"""Count the bytes that a scheduled program moves between a device's main memory and its cores.

Here an array counts once for each read or write of it in main memory. XLA's own `bytes accessed`
counts every operand of every instruction: a matrix that is prefetched into on-chip memory counts
three times, and a kernel's operands not at all, or as its author declared.
"""

import functools
import math

from ladder_jax.schedule import grouped
from ladder_jax.schedule.cost import per_token, trip_count
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Computation, Instruction, Program

# Operations that move no bytes: views of arrays, and the ends of transfers (their starts are
# counted).
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier".split()
)
_VIEWS = ("bitcast", "convert", "reshape", "copy", "transpose")
_RUNS = ("while", "call", "async-start", "call-start", "async-update", "call-update")


def bytes_moved(program: Program, *, experts: Experts | None = None) -> int:
    """Bytes read and written in one execution: every iteration of a loop, the largest branch of a
    conditional.

    Of a program that generates several tokens, bytes per token.

    experts: the model's, of which a kernel reads the chosen ones (see grouped.py).
    """
    moved = functools.partial(_of_instruction, experts=experts)
    return per_token(program, _of_computation(program.entry, experts), of=moved)


def _of_computation(computation: Computation, experts: Experts | None) -> int:
    return sum(_of_instruction(one, experts) for one in computation.instructions)


def _of_instruction(instruction: Instruction, experts: Experts | None) -> int:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if opcode in _RUNS:
        return trip_count(instruction) * sum(
            _of_computation(one, experts) for one in instruction.calls
        )
    if opcode == "conditional":
        return max(_of_computation(one, experts) for one in instruction.calls)
    if one := grouped.kernel(instruction, experts=experts):
        return round(one.bytes)
    if opcode == "fusion":
        return _fusion(instruction, instruction.calls[0])
    if opcode in _PARTIAL:
        return sum(_PARTIAL[opcode](instruction))
    if opcode in ("copy-start", "slice-start"):
        # source and destination, in either order; a slice reads only what it keeps
        ends = instruction.arrays[:2]
        return min(end.bytes for end in ends) * sum(not end.on_chip for end in ends)
    if opcode == "collective-permute-start":  # its result tuple begins with operands and results
        return sum(array.in_memory for array in instruction.arrays[: 2 * len(operands)])
    read = sum(operand.in_memory for operand in operands)
    # A collective's result tuple repeats the operands.
    return 2 * read if opcode.endswith("-start") else read + instruction.in_memory


def _fusion(fusion: Instruction, body: Computation) -> int:
    parameters = {int(i.literal or 0): i for i in body.instructions if i.opcode == "parameter"}
    read = sum(
        _read(parameters[n], body, operand.in_memory) for n, operand in enumerate(fusion.operands)
    )
    roots = body.root.operands if body.root.opcode == "tuple" else (body.root,)
    return read + sum(
        min(_written(one), array.in_memory) for one, array in zip(roots, fusion.arrays)
    )


def _read(array: Instruction, body: Computation, size: int) -> int:
    """Bytes of a parameter of `size` bytes in main memory that its users in a fusion read."""
    total = 0
    for user in body.instructions:
        if array not in user.operands:
            continue
        if user.opcode in _VIEWS:
            total += _read(user, body, size)
        elif user.opcode in _PARTIAL and user.operands[0] is array:
            total += _PARTIAL[user.opcode](user)[0]
        else:
            return size
    return min(total, size)


def _written(array: Instruction) -> float:
    array = array.behind(_VIEWS)
    return (
        _PARTIAL[array.opcode](array)[1]
        if array.opcode in ("dynamic-update-slice", "scatter")
        else math.inf
    )


def _picked(part: Instruction) -> tuple[int, int]:
    return part.bytes, part.in_memory


# Bytes (read, written) of operations that access only a part of their first operand. An update in
# place reads nothing of the array that it overwrites.
_PARTIAL = {
    "dynamic-slice": _picked,
    "slice": _picked,
    "gather": _picked,
    "dynamic-update-slice": lambda update: (0, update.operands[1].bytes),
    "scatter": lambda update: (0, update.operands[2].bytes),
}
