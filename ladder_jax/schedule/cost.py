"""What an instruction of a program costs: matmul FLOPs by its shapes, time by the compiler's own estimate."""

import collections
import functools
import math
import re

from ladder_jax.parallel.collectives import TOKEN_LOOP
from ladder_jax.schedule.hlo import Computation, Instruction, Program

GARBAGE_CYCLES = 2**62  # libtpu writes 2^63 - 1 where it has no estimate

Flops = collections.Counter  # by sublayer: "attention", "mlp", "joint" (both), "" for what is in none
SUBLAYER = re.compile(r"(?<![\w])(attention|mlp|joint)(?![\w])")


def sublayer_of(op_name: str) -> str:
    """The last of those named scopes in it, or ""."""
    return (SUBLAYER.findall(op_name) or [""])[-1]


class Costs:
    """Costs of `program`'s instructions, those of the computations that they call included."""

    def __init__(self, program: Program):
        self._program = program
        self._flops = functools.cache(self._computation_flops)
        self._cycles = functools.cache(self._computation_cycles)

    def matmul_flops(self, instruction: Instruction, *, within: Computation) -> Flops:
        """2 x multiply-adds of the matrix products in it, by the sublayer whose named scope they stand in.

        A kernel (custom call) has none that can be read.
        """
        count = _COUNTERS.get(instruction.opcode)
        if instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
            count = _gemm
        if count:
            return Flops({sublayer_of(instruction.op_name): count(instruction, within)})
        total, trips = Flops(), self._trips(instruction, within)
        for name in instruction.calls:
            for sublayer, flops in self._flops(name).items():
                total[sublayer] += trips * flops
        return total

    def cycles(self, instruction: Instruction, *, within: Computation) -> int | None:
        """The compiler's estimate for one execution; None where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        if found:
            return int(found[1]) if int(found[1]) < GARBAGE_CYCLES else None
        if instruction.opcode not in ("while", "call", "conditional"):
            return None
        below = [self._cycles(name) for name in instruction.calls]
        known = [cycles for cycles in below if cycles is not None]
        return self._trips(instruction, within) * sum(known) if known else None

    def total_cycles(self) -> int | None:
        """Of the whole program, one execution, loops as often as they turn; of one that makes several tokens, a token's
        share."""
        total, loop = self._cycles(self._program.entry.name), token_loop(self._program)
        if total is None or loop is None:
            return total
        inside = self.cycles(loop, within=self._program.entry) or 0
        return inside + (total - inside) // turns(loop, within=self._program.entry, program=self._program)

    def trips(self, computation: str) -> int:
        """How often `computation` runs in one execution of the program."""
        return self._trip_counts.get(computation, 0)

    @functools.cached_property
    def _trip_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}

        def visit(name: str, times: int):
            counts[name] = counts.get(name, 0) + times
            computation = self._program.computations[name]
            for instruction in computation.instructions:
                for called in instruction.calls:
                    visit(called, times * self._trips(instruction, computation))

        visit(self._program.entry.name, 1)
        return counts

    def _trips(self, instruction: Instruction, within: Computation) -> int:
        return trip_count(instruction, within=within, program=self._program) if instruction.opcode == "while" else 1

    def _computation_flops(self, name: str) -> Flops:
        computation = self._program.computations[name]
        return sum((self.matmul_flops(i, within=computation) for i in computation.instructions), Flops())

    def _computation_cycles(self, name: str) -> int | None:
        computation = self._program.computations[name]
        found = [self.cycles(i, within=computation) for i in computation.instructions]
        known = [cycles for cycles in found if cycles is not None]
        return sum(known) if known else None


_TOKENS = re.compile(rf"(?<!\w){TOKEN_LOOP}/while(?!/)")  # that loop itself: those in its body go on with /body


def token_loop(program: Program) -> Instruction | None:
    """The loop over new tokens, if the program has one."""
    loops = [i for i in program.entry.instructions if i.opcode == "while" and _TOKENS.search(i.op_name)]
    return loops[0] if loops else None


def trip_count(loop: Instruction, *, within: Computation, program: Program) -> int:
    """`turns`, but that the loop over new tokens counts once: a decode program's figures are those of one token."""
    return 1 if _TOKENS.search(loop.op_name) else turns(loop, within=within, program=program)


def turns(loop: Instruction, *, within: Computation, program: Program) -> int:
    """Of a `while`: as the compiler noted them, or `i < limit` of its condition, counted from zero by one.

    Raises ValueError where neither says it: a count of 1 would be a wrong report.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(noted[1])
    condition = program.computations[loop.attribute("condition").lstrip("%")]
    root = condition.instructions[-1]
    constants = [condition.by_name[name] for name in root.operands if condition.by_name[name].opcode == "constant"]
    if root.opcode == "compare" and root.attribute("direction") == "LT" and len(constants) == 1:
        return int(constants[0].literal)
    raise ValueError(f"cannot tell how often the loop {loop.name} turns")


def _operand(instruction: Instruction, index: int, within: Computation) -> tuple[int, ...]:
    return within.by_name[instruction.operands[index]].arrays[0][1]


def _dot(dot: Instruction, within: Computation) -> int:
    left = _operand(dot, 0, within)
    contracted = re.findall(r"\d+", dot.attribute("lhs_contracting_dims") or "")
    return 2 * math.prod(dot.arrays[0][1]) * math.prod(left[int(dim)] for dim in contracted)


def _gemm(call: Instruction, within: Computation) -> int:
    left = _operand(call, 0, within)
    noted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
    contracted = re.findall(r"\d+", noted[1] if noted else "")
    return 2 * math.prod(call.arrays[0][1]) * math.prod(left[int(dim)] for dim in contracted)


def _convolution(conv: Instruction, within: Computation) -> int:
    """TPU compilers write every matmul as a convolution; a batch dimension becomes a strided window of it.

    So the multiply-adds are counted position by position: those that fall on padding or on the
    holes of a dilated operand are no work.
    """
    left_labels, right_labels, out_labels = re.match(r"(\w+)_(\w+)->(\w+)", conv.attribute("dim_labels")).groups()
    left, right, out = _operand(conv, 0, within), _operand(conv, 1, within), conv.arrays[0][1]
    window = dict(part.split("=") for part in (conv.attribute("window") or "{}").strip("{}").split())
    positions = 1
    spatial = [label for label in out_labels if label.isdigit()]
    for axis, label in enumerate(spatial):
        setting = lambda name, default: window.get(name, "x".join([default] * len(spatial))).split("x")[axis]
        positions *= _valid_positions(
            size=left[left_labels.index(label)],
            kernel=right[right_labels.index(label)],
            out=out[out_labels.index(label)],
            stride=int(setting("stride", "1")),
            low=int(setting("pad", "0_0").split("_")[0]),
            dilate=int(setting("lhs_dilate", "1")),
            kernel_dilate=int(setting("rhs_dilate", "1")),
        )
    others = out[out_labels.index("b")] * out[out_labels.index("f")] * right[right_labels.index("i")]
    return 2 * others * positions


def _valid_positions(
    *, size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int
) -> int:
    """How many (output, kernel) index pairs of one dimension meet a real element of the input."""
    count = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride + k * kernel_dilate - low
            count += at >= 0 and at % dilate == 0 and at // dilate < size
    return count


def _multiplied_sum(reduce: Instruction, within: Computation) -> int:
    """A matrix times one row, as TPU compilers write it where the row is all there is: multiply, then add up."""
    if not reduce.op_name.endswith("/dot_general"):
        return 0
    summand = within.by_name[reduce.operands[0]]
    while summand.opcode in ("convert", "bitcast", "copy", "reshape", "transpose"):
        summand = within.by_name[summand.operands[0]]
    return 2 * math.prod(summand.arrays[0][1]) if summand.opcode == "multiply" else 0


_COUNTERS = {"dot": _dot, "convolution": _convolution, "reduce": _multiplied_sum}
