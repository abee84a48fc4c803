"""Cost of a program's instructions: matmul FLOPs from shapes, cycles from the compiler's estimates."""

import collections
import functools
import math
import re

from ladder_jax.parallel.collectives import TOKEN_LOOP
from ladder_jax.schedule import grouped
from ladder_jax.schedule.grouped import Experts, Grouped
from ladder_jax.schedule.hlo import Computation, Instruction, Program

GARBAGE_CYCLES = 2**62  # libtpu writes 2^63 - 1 where it has no estimate

Flops = collections.Counter  # by sublayer: "attention", "mlp", "joint" (both), "" outside of sublayers
SUBLAYER = re.compile(r"(?<![\w])(attention|mlp|joint)(?![\w])")


def sublayer_of(op_name: str) -> str:
    """The innermost sublayer scope in an operation's name, or ""."""
    return (SUBLAYER.findall(op_name) or [""])[-1]


class Costs:
    """Costs of `program`'s instructions, including the computations that they call.

    experts: the model's, of whose kernels the text does not show how much they compute (see grouped.py).
    """

    def __init__(self, program: Program, *, experts: Experts | None = None):
        self._program, self._experts = program, experts
        self._flops = functools.cache(self._computation_flops)
        self._cycles = functools.cache(self._computation_cycles)

    def matmul_flops(self, instruction: Instruction, *, within: Computation) -> Flops:
        """2 x multiply-adds of the instruction's matrix products, by the sublayer named in their scope.

        0 for a kernel (custom call) other than a grouped matmul: its text does not show what it computes.
        """
        count = _COUNTERS.get(instruction.opcode)
        if instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
            count = _gemm
        if count:
            return Flops({sublayer_of(instruction.op_name): count(instruction, within)})
        if one := self.grouped(instruction, within=within):
            return Flops({sublayer_of(instruction.op_name): one.flops})
        total, trips = Flops(), self._trips(instruction, within)
        for name in instruction.calls:
            for sublayer, flops in self._flops(name).items():
                total[sublayer] += trips * flops
        return total

    def grouped(self, instruction: Instruction, *, within: Computation) -> Grouped | None:
        return grouped.kernel(instruction, within=within, experts=self._experts)

    def flops_of_scope(self, scope: str, *, within: Computation) -> int:
        """Matmul FLOPs of one run of a computation, of the operations under a named scope; without its loops."""
        total = 0
        for instruction in within.instructions:
            if instruction.opcode == "fusion":
                called = (self._program.computations[name] for name in instruction.calls)
                total += sum(self.flops_of_scope(scope, within=one) for one in called)
            elif instruction.op_name.startswith(scope):
                total += self.matmul_flops(instruction, within=within).total()
        return total

    def cycles(self, instruction: Instruction, *, within: Computation) -> int | None:
        """The compiler's estimate for one execution; of a grouped matmul, where it gives none, ours; otherwise None."""
        estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        if estimate:
            return int(estimate[1]) if int(estimate[1]) < GARBAGE_CYCLES else None
        if one := self.grouped(instruction, within=within):
            hardware = self._experts.hardware if self._experts and self._compiler_estimates else None
            return round(one.seconds(hardware) * hardware.clock) if hardware and hardware.clock else None
        if instruction.opcode not in ("while", "call", "conditional"):
            return None
        called = [self._cycles(name) for name in instruction.calls]
        estimates = [cycles for cycles in called if cycles is not None]
        return self._trips(instruction, within) * sum(estimates) if estimates else None

    @functools.cached_property
    def _compiler_estimates(self) -> bool:
        """Whether the compiler gives any estimate: without machine code (`record.Until.SCHEDULE`) it has none."""
        everything = (i for computation in self._program.computations.values() for i in computation.instructions)
        return any('"estimated_cycles"' in instruction.attributes for instruction in everything)

    def total_cycles(self) -> int | None:
        """Estimated cycles of one execution of the program, with every loop's iterations counted; of a program that
        generates several tokens, cycles per token."""
        total, loop = self._cycles(self._program.entry.name), token_loop(self._program)
        if total is None or loop is None:
            return total
        per_token = self.cycles(loop, within=self._program.entry) or 0
        tokens = iterations(loop, within=self._program.entry, program=self._program)
        return per_token + (total - per_token) // tokens

    def trips(self, computation: str) -> int:
        """Number of runs of `computation` in one execution of the program."""
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
        cycles = [self.cycles(i, within=computation) for i in computation.instructions]
        estimates = [estimate for estimate in cycles if estimate is not None]
        return sum(estimates) if estimates else None


def attention_kernel_flops(instruction: Instruction, *, within: Computation) -> int:
    """Of the matrix products in a kernel of causal attention on TPUs, over pairs of a query and a position it sees.

    Queries [.., N, T, H], the array of the most heads, are the last T of S positions. A pair has 2 H FLOPs a product.
    """
    found = _ATTENTION_KERNEL.search(instruction.op_name)
    if instruction.opcode != "custom-call" or not found:
        return 0
    size = instruction.arrays[0][1][-1]
    arrays = [array for name in instruction.operands for array in within.by_name[name].arrays]
    operands = [dims for kind, dims in arrays if "f" in kind and len(dims) > 2 and dims[-1] == size]  # not the mask's
    *heads, queries, _ = max(operands, key=lambda dims: math.prod(dims[:-2]))
    positions = max(dims[-2] for dims in operands)
    pairs = math.prod(heads) * queries * (2 * positions - queries + 1) // 2
    return _ATTENTION_PRODUCTS[found[1]] * 2 * size * pairs


_ATTENTION_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}  # backward the scores again, the probabilities' gradient and those
_ATTENTION_KERNEL = re.compile(r"splash_mha_(fwd|dq|dkv)")


# The loop itself: names of loops in its body continue with /body.
_TOKENS = re.compile(rf"(?<!\w){TOKEN_LOOP}/while(?!/)")


def token_loop(program: Program) -> Instruction | None:
    """The loop over new tokens, if the program has one."""
    loops = [i for i in program.entry.instructions if i.opcode == "while" and _TOKENS.search(i.op_name)]
    return loops[0] if loops else None


def trip_count(loop: Instruction, *, within: Computation, program: Program) -> int:
    """The iterations of a loop; 1 for the loop over new tokens, because a decode program is reported per token."""
    return 1 if _TOKENS.search(loop.op_name) else iterations(loop, within=within, program=program)


def iterations(loop: Instruction, *, within: Computation, program: Program) -> int:
    """Iterations of a `while`: the compiler's `known_trip_count`, or the limit in its condition `i < limit`.

    Raises ValueError if the program has neither: a guess would make the report wrong.
    """
    if trip_count_note := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(trip_count_note[1])
    condition = program.computations[loop.attribute("condition").lstrip("%")]
    root = condition.instructions[-1]
    constants = [condition.by_name[name] for name in root.operands if condition.by_name[name].opcode == "constant"]
    if root.opcode == "compare" and root.attribute("direction") == "LT" and len(constants) == 1:
        return -(-int(constants[0].literal) // _increment(condition, program.computations[loop.calls[0]]))
    raise ValueError(f"cannot tell how often the loop {loop.name} turns")


def _increment(condition: Computation, body: Computation) -> int:
    """What one turn adds to the loop's counter: more than 1 where the compiler has unrolled the loop in part."""
    compared = next((condition.by_name[name] for name in condition.instructions[-1].operands), None)
    place = compared.attribute("index") if compared.opcode == "get-tuple-element" else None
    if place is None or body.instructions[-1].opcode != "tuple":
        return 1
    counter = body.by_name[body.instructions[-1].operands[int(place)]]
    added = [body.by_name[name] for name in counter.operands] if counter.opcode == "add" else []
    return next((int(one.literal) for one in added if one.opcode == "constant"), 1)


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
    """TPU compilers write every matmul as a convolution, and a batch dimension as a strided window of it.

    So multiply-adds are counted position by position, without those on padding or on the holes of a dilated operand.
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
    """Number of (output, kernel) index pairs of one dimension that read a real element of the input."""
    count = 0
    for o in range(out):
        for k in range(kernel):
            at = o * stride + k * kernel_dilate - low
            count += at >= 0 and at % dilate == 0 and at // dilate < size
    return count


def _multiplied_sum(reduce: Instruction, within: Computation) -> int:
    """FLOPs of a matrix-vector product, which TPU compilers write as a multiply and a reduce."""
    if not reduce.op_name.endswith("/dot_general"):
        return 0
    summand = within.by_name[reduce.operands[0]]
    while summand.opcode in ("convert", "bitcast", "copy", "reshape", "transpose"):
        summand = within.by_name[summand.operands[0]]
    return 2 * math.prod(summand.arrays[0][1]) if summand.opcode == "multiply" else 0


_COUNTERS = {"dot": _dot, "convolution": _convolution, "reduce": _multiplied_sum}
