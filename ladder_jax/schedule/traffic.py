"""Count the bytes that a scheduled program moves between a device's main memory and its cores.

Here an array counts once for each read or write of it in main memory. XLA's own `bytes accessed` counts every operand
of every instruction: a matrix that is prefetched into on-chip memory counts three times, and a kernel's operands not at
all, or as its author declared.
"""

import dataclasses
import math

from ladder_jax.schedule import grouped
from ladder_jax.schedule.cost import iterations, token_loop, trip_count
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Computation, Instruction, Program, size_in_bytes

# Operations that move no bytes: views of arrays, and the ends of transfers (their starts are counted).
_FREE = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier"
    " copy-done slice-done call-done async-done all-reduce-done all-gather-done collective-permute-done".split()
)
_VIEWS = ("bitcast", "convert", "reshape", "copy", "transpose")


def bytes_moved(program: Program, *, experts: Experts | None = None) -> int:
    """Bytes read and written in one execution: every iteration of a loop, the largest branch of a conditional.

    experts: the model's, of which a kernel reads the chosen ones (see grouped.py).

    Of a program that generates several tokens, the bytes per token: one iteration of the loop over tokens, and the
    traffic outside the loop divided by the number of tokens.
    """
    entry, loop = program.entry, token_loop(program)
    count = _Count(program, experts)
    total = count.computation(entry)
    if loop is None:
        return total
    per_token = count.instruction(loop, entry)
    return per_token + (total - per_token) // iterations(loop, within=entry, program=program)


@dataclasses.dataclass(frozen=True)
class _Count:
    program: Program
    experts: Experts | None

    def computation(self, computation: Computation) -> int:
        return sum(self.instruction(i, computation) for i in computation.instructions)

    def instruction(self, instruction: Instruction, within: Computation) -> int:
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0
        called = [self.program.computations[name] for name in instruction.calls]
        if instruction.opcode == "while":
            trips = trip_count(instruction, within=within, program=self.program)
            return trips * sum(self.computation(one) for one in called)
        if instruction.opcode == "conditional":
            return max(self.computation(one) for one in called)
        if instruction.opcode in ("call", "async-start", "call-start", "async-update", "call-update"):
            return sum(self.computation(one) for one in called)
        if one := grouped.kernel(instruction, within=within, experts=self.experts):
            return round(one.bytes)
        operands = [within.by_name[name] for name in instruction.operands]
        if instruction.opcode == "fusion":
            return _fusion(instruction, operands, called[0])
        if instruction.opcode in _PARTIAL:
            read, written = _PARTIAL[instruction.opcode](instruction, operands)
            return read + written
        if instruction.opcode in ("copy-start", "slice-start"):
            ends = _arrays(instruction)[:2]  # source and destination, in either order; a slice reads only what it keeps
            return min(size for _, size in ends) * sum(not on_chip for on_chip, _ in ends)
        if instruction.opcode == "collective-permute-start":  # its result tuple begins with operands and results
            return sum(0 if on_chip else size for on_chip, size in _arrays(instruction)[: 2 * len(operands)])
        if instruction.opcode.endswith("-start"):  # a collective: its result tuple repeats the operands
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


def _read(array: Instruction, body: Computation, size: int) -> int:
    """Bytes of a parameter of `size` bytes in main memory that its users in a fusion read."""
    total = 0
    for user in body.instructions:
        if array.name not in user.operands:
            continue
        if user.opcode in _VIEWS:
            total += _read(user, body, size)
        elif user.opcode in _PARTIAL and user.operands[0] == array.name:
            total += _PARTIAL[user.opcode](user, [body.by_name[name] for name in user.operands])[0]
        else:
            return size
        if total >= size:
            return size
    return total


def _written(array: Instruction, body: Computation) -> float:
    while array.opcode in _VIEWS:
        array = body.by_name[array.operands[0]]
    if array.opcode in ("dynamic-update-slice", "scatter"):
        return _PARTIAL[array.opcode](array, [body.by_name[name] for name in array.operands])[1]
    return math.inf


# Bytes (read, written) of operations that access only a part of their first operand. An update in place reads nothing
# of the array that it overwrites.
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
    """(whether it is in on-chip memory, bytes) of each array of the result."""
    pairs = zip(instruction.arrays, instruction.on_chip, strict=True)
    return [(on_chip, size_in_bytes((array,))) for array, on_chip in pairs]


def _in_memory(instruction: Instruction) -> int:
    return sum(size for on_chip, size in _arrays(instruction) if not on_chip)
