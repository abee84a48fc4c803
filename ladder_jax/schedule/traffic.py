"""Count the bytes that a scheduled program moves between a device's main memory and its cores.

Here an array counts once for each read or write of it in main memory. XLA's own `bytes accessed` counts every operand
of every instruction: a matrix that is prefetched into on-chip memory counts three times, and a kernel's operands not at
all, or as its author declared.
"""

import math

from ladder_jax.schedule import grouped
from ladder_jax.schedule.cost import iterations, token_loop, trip_count
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Computation, Instruction, Program, size_in_bytes

# Operations that move no bytes: views of arrays, and the ends of transfers (their starts are counted).
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier".split()
)
_VIEWS = ("bitcast", "convert", "reshape", "copy", "transpose")
_RUNS = ("while", "call", "async-start", "call-start", "async-update", "call-update")


def bytes_moved(program: Program, *, experts: Experts | None = None) -> int:
    """Bytes read and written in one execution: every iteration of a loop, the largest branch of a conditional.

    experts: the model's, of which a kernel reads the chosen ones (see grouped.py).

    Of a program that generates several tokens, the bytes per token: one iteration of the loop over tokens, and the
    traffic outside the loop divided by the number of tokens.
    """
    total, loop = _of_computation(program.entry, experts), token_loop(program)
    if loop is None:
        return total
    per_token = _of_instruction(loop, experts)
    return per_token + (total - per_token) // iterations(loop)


def _of_computation(computation: Computation, experts: Experts | None) -> int:
    return sum(_of_instruction(one, experts) for one in computation.instructions)


def _of_instruction(instruction: Instruction, experts: Experts | None) -> int:
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if opcode in _RUNS:
        return trip_count(instruction) * sum(_of_computation(one, experts) for one in instruction.calls)
    if opcode == "conditional":
        return max(_of_computation(one, experts) for one in instruction.calls)
    if one := grouped.kernel(instruction, experts=experts):
        return round(one.bytes)
    if opcode == "fusion":
        return _fusion(instruction, instruction.calls[0])
    if opcode in _PARTIAL:
        return sum(_PARTIAL[opcode](instruction))
    if opcode in ("copy-start", "slice-start"):
        ends = _arrays(instruction)[:2]  # source and destination, in either order; a slice reads only what it keeps
        return min(size for _, size in ends) * sum(not on_chip for on_chip, _ in ends)
    if opcode == "collective-permute-start":  # its result tuple begins with operands and results
        return sum(0 if on_chip else size for on_chip, size in _arrays(instruction)[: 2 * len(operands)])
    if opcode.endswith("-start"):  # a collective: its result tuple repeats the operands
        return 2 * sum(map(_in_memory, operands))
    return sum(map(_in_memory, operands)) + _in_memory(instruction)


def _fusion(fusion: Instruction, body: Computation) -> int:
    parameters = {int(i.literal or 0): i for i in body.instructions if i.opcode == "parameter"}
    read = sum(_read(parameters[n], body, _in_memory(operand)) for n, operand in enumerate(fusion.operands))
    roots = body.root.operands if body.root.opcode == "tuple" else (body.root,)
    pairs = zip(roots, _arrays(fusion))
    return read + sum(0 if on_chip else min(_written(one), size) for one, (on_chip, size) in pairs)


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
        if total >= size:
            return size
    return total


def _written(array: Instruction) -> float:
    array = array.behind(_VIEWS)
    return _PARTIAL[array.opcode](array)[1] if array.opcode in ("dynamic-update-slice", "scatter") else math.inf


def _picked(part: Instruction) -> tuple[int, int]:
    return _size(part), _in_memory(part)


# Bytes (read, written) of operations that access only a part of their first operand. An update in place reads nothing
# of the array that it overwrites.
_PARTIAL = {
    "dynamic-slice": _picked,
    "slice": _picked,
    "gather": _picked,
    "dynamic-update-slice": lambda update: (0, _size(update.operands[1])),
    "scatter": lambda update: (0, _size(update.operands[2])),
}


def _size(instruction: Instruction) -> int:
    return size_in_bytes(instruction.arrays)


def _arrays(instruction: Instruction) -> list[tuple[bool, int]]:
    """(whether it is in on-chip memory, bytes) of each array of the result."""
    pairs = zip(instruction.arrays, instruction.on_chip, strict=True)
    return [(on_chip, size_in_bytes((array,))) for array, on_chip in pairs]


def _in_memory(instruction: Instruction) -> int:
    return sum(size for on_chip, size in _arrays(instruction) if not on_chip)
