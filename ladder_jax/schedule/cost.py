"""Cost of a program's instructions: matmul FLOPs and bytes of main memory from shapes, cycles from
the compiler's estimates.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ladder_jax.errors import UserError
from ladder_jax.schedule import grouped
from ladder_jax.schedule.grouped import Experts, Grouped
from ladder_jax.schedule.hlo import Computation, Instruction, Program
from ladder_jax.scopes import TOKEN_LOOP

GARBAGE_CYCLES = 2**62  # libtpu writes 2^63 - 1 where it has no estimate
# their result is an array that is there already
VIEWS = ("bitcast", "convert", "reshape", "copy", "transpose")

SUBLAYERS = ("attention", "mlp", "joint")  # joint: both
# by sublayer, "" outside of sublayers
Flops = collections.Counter
SUBLAYER = re.compile(rf"(?<![\w])({'|'.join(SUBLAYERS)})(?![\w])")


def sublayer_of(op_name: str) -> str:
    """The innermost sublayer scope in an operation's name, or ""."""
    return (SUBLAYER.findall(op_name) or [""])[-1]


def executed(
    instructions: Iterable[Instruction], times: int = 1
) -> Iterator[tuple[int, Instruction]]:
    """The instructions, those that they call too, and how often each runs."""
    for one in instructions:
        yield times, one
        for called in one.calls:
            yield from executed(called.instructions, times * trip_count(one))


@dataclasses.dataclass(eq=False)
class Costs:
    """Costs of a program's instructions, including the computations that they call.

    experts: the model's, of whose kernels the text does not show how much they compute
        (see grouped.py).
    """

    program: Program
    experts: Experts | None = None

    def flops(self, instruction: Instruction) -> int:
        """2 x multiply-adds of the instruction's own matrix product.

        0 for a kernel (custom call) other than a grouped matmul: its text does not show what it
        computes.
        """
        if instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
            return _dot(instruction)
        if count := _COUNTERS.get(instruction.opcode):
            return count(instruction)
        one = self.grouped(instruction)
        return one.flops if one else 0

    def flops_of(self, instructions: Iterable[Instruction], *, scope: str = "") -> Flops:
        """Of the matrix products that run, by the sublayer in their names; of those alone whose
        names begin with `scope`.
        """
        flops = Flops()
        for times, one in executed(instructions):
            if one.op_name.startswith(scope):
                flops[sublayer_of(one.op_name)] += times * self.flops(one)
        return +flops

    def grouped(self, instruction: Instruction) -> Grouped | None:
        return grouped.kernel(instruction, experts=self.experts)

    @functools.cached_property
    def _estimated(self) -> bool:
        """Whether the compiler estimates any: before it has made machine code it does not."""
        return any("estimated_cycles" in one.attributes for one in self.program.instructions)

    def cycles(self, instruction: Instruction) -> int:
        """The compiler's estimate for one execution; of a grouped matmul, where it gives none,
        ours; otherwise 0.
        """
        if estimate := re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes):
            return int(estimate[1]) if int(estimate[1]) < GARBAGE_CYCLES else 0
        hardware = self.experts and self.experts.hardware
        one = self.grouped(instruction)
        if one and hardware and hardware.clock and self._estimated:
            return round(one.seconds(hardware) * hardware.clock)
        if instruction.opcode not in ("while", "call", "conditional"):
            return 0
        called = (inner for one in instruction.calls for inner in one.instructions)
        return trip_count(instruction) * sum(map(self.cycles, called))

    @functools.cached_property
    def total_cycles(self) -> int | None:
        """Estimated cycles of one execution of the program, with every loop's iterations counted;
        of a program that generates several tokens, cycles per token. None if the compiler gives
        none.
        """
        return self._per_token(self.cycles) or None

    @property
    def bytes_moved(self) -> int:
        """Bytes that move between a device's main memory and its cores in one execution: every
        iteration of a loop, the largest branch of a conditional. Of a program that generates
        several tokens, bytes per token.

        An array counts once for each read or write of it in main memory. XLA's own `bytes accessed`
        counts every operand of every instruction: a matrix that is prefetched into on-chip memory
        counts three times, and a kernel's operands not at all, or as its author declared.
        """
        return self._per_token(self.moved)

    def _per_token(self, of: Callable[[Instruction], int]) -> int:
        """The sum of what each instruction costs: one turn of the loop over new tokens, and a
        token's share of what is outside of it; all, if the program has no such loop.
        """
        instructions = self.program.entry.instructions
        total = sum(map(of, instructions))
        for one in instructions:
            if one.opcode == "while" and _TOKENS.search(one.op_name):
                return of(one) + (total - of(one)) // iterations(one)
        return total

    def moved(self, instruction: Instruction) -> int:
        """`bytes_moved` of one instruction."""
        opcode = instruction.opcode
        operands = instruction.operands
        if opcode in BOOKKEEPING or opcode.endswith("-done"):
            return 0
        if opcode in _RUNS:
            return trip_count(instruction) * sum(map(self._moved_in, instruction.calls))
        if opcode == "conditional":
            return max(map(self._moved_in, instruction.calls))
        if one := self.grouped(instruction):
            return round(one.bytes)
        if opcode == "fusion":
            return _moved_by_fusion(instruction)
        if opcode in _PARTIAL:
            return sum(_PARTIAL[opcode](instruction))
        if opcode in ("copy-start", "slice-start"):
            # source and destination, in either order; a slice reads only what it keeps
            ends = instruction.arrays[:2]
            return min(end.bytes for end in ends) * sum(not end.on_chip for end in ends)
        if opcode == "collective-permute-start":
            # its result tuple begins with operands and results
            return sum(array.in_memory for array in instruction.arrays[: 2 * len(operands)])
        read = sum(operand.in_memory for operand in operands)
        # A collective's result tuple repeats the operands.
        return 2 * read if opcode.endswith("-start") else read + instruction.in_memory

    def _moved_in(self, computation: Computation) -> int:
        return sum(map(self.moved, computation.instructions))

    @functools.cached_property
    def trips(self) -> Mapping[Computation, int]:
        """Number of runs of each computation in one execution of the program."""
        entry = self.program.entry
        counts = collections.Counter({entry: 1})
        for times, one in executed(entry.instructions):
            for called in one.calls:
                counts[called] += times * trip_count(one)
        return counts


def attention_kernel_flops(instruction: Instruction) -> int:
    """Of the matrix products in a kernel of causal attention on TPUs, over pairs of a query and a
    position it sees.

    Queries [.., N, T, H], the array of the most heads, are the last T of S positions. A pair has 2
    H FLOPs a product.
    """
    found = _ATTENTION_KERNEL.search(instruction.op_name)
    if instruction.opcode != "custom-call" or not found:
        return 0
    size = instruction.dims[-1]
    arrays = [
        array for operand in instruction.operands for array in operand.arrays if "f" in array.kind
    ]
    # not the mask's
    operands = [array.dims for array in arrays if len(array.dims) > 2 and array.dims[-1] == size]
    *heads, queries, _ = max(operands, key=lambda dims: math.prod(dims[:-2]))
    positions = max(dims[-2] for dims in operands)
    pairs = math.prod(heads) * queries * (2 * positions - queries + 1) // 2
    return _ATTENTION_PRODUCTS[found[1]] * 2 * size * pairs


# backward the scores again, the probabilities' gradient and those
_ATTENTION_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_ATTENTION_KERNEL = re.compile(r"splash_mha_(fwd|dq|dkv)")


# The loop itself: names of loops in its body continue with /body.
_TOKENS = re.compile(rf"(?<!\w){TOKEN_LOOP}/while(?!/)")


def trip_count(instruction: Instruction) -> int:
    """How often it runs what it calls: a loop's iterations, 1 of the loop over new tokens, because
    a decode program is reported per token, and 1 of any other instruction.
    """
    once = instruction.opcode != "while" or _TOKENS.search(instruction.op_name)
    return 1 if once else iterations(instruction)


def iterations(loop: Instruction) -> int:
    """Iterations of a `while`: the compiler's `known_trip_count`, or those of a counter in its
    state that begins at a constant, grows by a constant, and must be less than a constant.

    Raises UserError if the program has neither: a guess would make the report wrong.
    """
    if trip_count_note := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(trip_count_note[1])
    asked = loop.computation("condition").root
    before = loop.operands[0]
    after = loop.calls[0].root
    counts = asked.opcode == "compare" and asked.attribute("direction") == "LT"
    if counts and asked.operands[0].opcode == "get-tuple-element" and before.opcode == "tuple":
        index = asked.operands[0].attribute("index")
        start = _constant(before.operands[int(index)])
        limit = _constant(asked.operands[1])
        step = _added(after.operands[int(index)], index) if after.opcode == "tuple" else None
        if start is not None and limit is not None and step:
            return len(range(start, limit, step))
    raise UserError(
        f"the text does not show how often the loop {loop.name} turns: audit its body, as a function of its own"
    )


def _constant(one: Instruction) -> int | None:
    """The value of a whole number that the text shows."""
    one = one.behind(VIEWS)
    whole = one.opcode == "constant" and re.fullmatch(r"-?\d+", one.literal)
    return int(one.literal) if whole else None


def _added(one: Instruction, index: str) -> int | None:
    """What a turn adds to an element of the loop's state: more than 1 where the compiler has
    unrolled the loop in part. None if that is no positive constant.
    """
    one = one.behind(VIEWS)
    terms = [term.behind(VIEWS) for term in one.operands]
    own = any(
        term.attribute("index") == index and term.operands[0].opcode == "parameter"
        for term in terms
    )
    steps = [step for term in terms if (step := _constant(term)) and step > 0]
    return steps[0] if one.opcode == "add" and own and steps else None


def _dot(product: Instruction) -> int:
    """A dot's attribute, or in the configuration of a call of cuBLAS, names the contracted
    dimensions.
    """
    noted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)', product.attributes)
    left = product.operands[0].dims
    contracted = re.findall(r"\d+", noted[1] if noted else "")
    return 2 * math.prod(product.dims) * math.prod(left[int(dim)] for dim in contracted)


def _convolution(conv: Instruction) -> int:
    """TPU compilers write every matmul as a convolution: a dimension of it, in one, two or all three
    of the arrays, may be a window, which counts once. So does that of a real convolution.
    """
    labels = re.match(r"(\w+)_(\w+)->(\w+)", conv.attribute("dim_labels")).groups()
    shapes = [one.dims for one in (*conv.operands[:2], conv)]
    left, right, out = (dict(zip(names, dims)) for names, dims in zip(labels, shapes))
    windows = [max(left[name], right[name], out[name]) for name in out if name.isdigit()]
    return 2 * out["b"] * out["f"] * right["i"] * math.prod(windows)


def _multiplied_sum(reduce: Instruction) -> int:
    """FLOPs of a matrix-vector product, which TPU compilers write as a multiply and a reduce."""
    if not reduce.op_name.endswith("/dot_general"):
        return 0
    summand = reduce.operands[0].behind(VIEWS)
    return 2 * math.prod(summand.dims) if summand.opcode == "multiply" else 0


_COUNTERS = {"dot": _dot, "convolution": _convolution, "reduce": _multiplied_sum}


# Operations that move no bytes. Nor do the ends of transfers: their starts are counted.
BOOKKEEPING = set(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier".split()
)
_RUNS = ("while", "call", "async-start", "call-start", "async-update", "call-update")


def _moved_by_fusion(fusion: Instruction) -> int:
    body = fusion.calls[0]
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
        if user.opcode in VIEWS:
            total += _read(user, body, size)
        elif user.opcode in _PARTIAL and user.operands[0] is array:
            total += _PARTIAL[user.opcode](user)[0]
        else:
            return size
    return min(total, size)


def _written(array: Instruction) -> float:
    array = array.behind(VIEWS)
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
