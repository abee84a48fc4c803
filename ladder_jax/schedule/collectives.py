"""The collectives of a scheduled program, and the compute that the schedule places beside each.

A collective is *synchronous* (the device waits) or has a *window*: the instructions issued between
its start and its done. On TPUs a reduce-scatter may be one fusion of an all-reduce and the slice
that this device keeps. XLA writes:

    all-reduce                               synchronous, on every backend; likewise the other kinds
    all-reduce-start ... all-reduce-done     NVIDIA GPU; likewise the other kinds
    async-start ... async-done, fusion-start ... fusion-done
                                             NVIDIA GPU, the collective in the called computation
    call-start, call-update ... call-done    TPU SparseCore; the start may come early, without
                                             operands, so the window starts at the update
    fusion(AsyncCollectiveStart) ... fusion(AsyncCollectiveDone)
                                             TPU v5e; pieces of one collective share a chain_id, and
                                             pieces fused with compute are in the window
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.schedule.cost import Costs, Flops, attention_kernel_flops
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
# Pallas kernels of TPUs and of NVIDIA GPUs that write to other devices
_COMMUNICATES = re.compile(r'"has_communication":true|uses_xla_collective_metadata = true')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, and its position in the schedule.

    operands: number of arrays that it carries; an all-reduce of several arrays is a merged one. The
        compiler for NVIDIA GPUs concatenates arrays into one flat operand; this counts the arrays
        in it.
    bytes: size of its operands on one device: unscattered arrays of a reduce-scatter, shards of an
        all-gather, all rows that a ragged all-to-all may send.
    axes: mesh axes that it spans, such as ("tensor",); empty if the program does not name them.
    ranks: number of devices in its group; 0 if unknown.
    executions: runs per execution of the program, as if each branch of a conditional ran; inside
        the loop over new tokens, runs per token.
    issued, awaited: positions of its start and its done in `computation`; equal if it is
        synchronous.
    operations: number of computing instructions in its window.
    flops: matmul FLOPs in its window, by sublayer.
    cycles: the compiler's estimate of the window's time; None if it gives none.
    kernels: number of opaque (Pallas) kernels in its window.
    scores: FLOPs of kernels of attention among them.
    permutes: of a ring (see rings.py), in issue order; `flops` and `cycles` are then those of all
        their windows together. matmul: FLOPs of the matmul that a ring feeds or drains.
    """

    name: str
    kind: str
    op_name: str
    operands: int
    bytes: int
    axes: tuple[str, ...]
    ranks: int
    computation: str
    executions: int
    issued: int
    awaited: int
    operations: int
    flops: Flops
    cycles: int | None
    kernels: int
    scores: int = 0
    permutes: tuple["Collective", ...] = ()
    matmul: float = 0.0

    @property
    def parts(self) -> tuple["Collective", ...]:
        """The messages whose windows are its own: itself, or a ring's permutes."""
        return self.permutes or (self,)

    @property
    def synchronous(self) -> bool:
        return all(one.issued == one.awaited for one in self.parts)


def find(costs: Costs) -> list[Collective]:
    """All collectives of the program that run: computation by computation, each in issue order."""
    mesh = mesh_of(costs.program)
    return [
        _measure(form, computation, costs, mesh)
        for computation in scheduled(costs.program)
        for form in forms(computation)
    ]


def beside(found: Iterable[Collective], *, costs: Costs) -> Iterator[tuple[int, Instruction]]:
    """The instructions in the windows of these collectives, and how often each runs; an instruction
    in two windows counts once.
    """
    messages = [part for one in found for part in one.parts]
    for name, index in dict.fromkeys(
        (one.computation, index) for one in messages for index in range(one.issued + 1, one.awaited)
    ):
        computation = costs.program.computations[name]
        yield costs.trips[computation], computation.instructions[index]


def unknown(program: Program) -> list[str]:
    """The names of collectives in a form which is not among those above, and of kernels that
    communicate, so that nothing counts them.
    """
    found = {form.collective for computation in scheduled(program) for form in forms(computation)}
    # A `chain_id` is on further pieces of one that is found.
    return [
        one.name
        for one in program.instructions
        if (
            re.match(
                r"((ragged-)?all-|collective-|reduce-scatter|send|recv)(?!.*-done$)", one.opcode
            )
            or (one.opcode == "custom-call" and _COMMUNICATES.search(one.attributes))
        )
        and one not in found
        and "is_host_transfer=true" not in one.attributes
        and "chain_id=" not in one.attributes
    ]


def scheduled(program: Program) -> list[Computation]:
    """The computations whose instructions the device issues in order: the entry, loop bodies,
    branches.
    """
    order = []

    def visit(computation: Computation):
        if computation in order:
            return
        order.append(computation)
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                for called in instruction.calls:
                    visit(called)

    visit(program.entry)
    return order


@dataclasses.dataclass(frozen=True)
class Form:
    """A collective, the computation that holds it, and the positions of its start and its done."""

    collective: Instruction
    holder: Computation
    issued: int
    awaited: int


def forms(computation: Computation) -> Iterator[Form]:
    instructions = computation.instructions
    for index, instruction in enumerate(instructions):
        if instruction.opcode in CONTROL_FLOW:
            continue
        kind, start, _ = instruction.opcode.partition("-start")
        found = (instruction, computation) if kind in KINDS else _called_collective(instruction)
        if found is None:
            continue
        if start:
            yield Form(*found, *_ends(instructions, index, kind))
        elif kind in KINDS:
            yield Form(*found, index, index)
        elif _calls_target(instruction, "AsyncCollectiveStart"):
            yield Form(*found, index, _chained_done(instructions, index, found[0]))
        elif instruction.opcode == "fusion" and "chain_id=" not in found[0].attributes:
            yield Form(*found, index, index)


def _called_collective(instruction: Instruction) -> tuple[Instruction, Computation] | None:
    """The collective in the computations that `instruction` calls."""
    for holder in instruction.calls:
        for inner in holder.instructions:
            if inner.opcode in KINDS:
                return inner, holder
            if deeper := _called_collective(inner):
                return deeper
    return None


def _ends(instructions: Sequence[Instruction], start: int, stem: str) -> tuple[int, int]:
    """Positions of the last update of the start at `start`, or of itself, and of its done."""
    issued = start
    for index in range(start + 1, len(instructions)):
        one = instructions[index]
        if instructions[issued] not in one.operands:
            continue
        if one.opcode == f"{stem}-update":
            issued = index
        elif one.opcode == f"{stem}-done":
            return issued, index
    raise _never_awaited(instructions[start])


def _chained_done(instructions: Sequence[Instruction], start: int, piece: Instruction) -> int:
    """Position of the AsyncCollectiveDone whose collective has the `chain_id` of `piece`."""
    for index in range(start + 1, len(instructions)):
        one = instructions[index]
        if _calls_target(one, "AsyncCollectiveDone"):
            last = _called_collective(one)
            if last and _chain(last[0]) == _chain(piece):
                return index
    raise _never_awaited(instructions[start])


def _chain(piece: Instruction) -> str:
    return re.search(r'chain_id="?(\d+)', piece.attributes)[1]


def _never_awaited(start: Instruction) -> UserError:
    return UserError(f"the schedule starts {start.name} and never awaits it")


def _calls_target(instruction: Instruction, target: str) -> bool:
    inside = (inner for called in instruction.calls for inner in called.instructions)
    named = f'custom_call_target="{target}"'
    return instruction.opcode == "fusion" and any(named in inner.attributes for inner in inside)


def _measure(
    form: Form, computation: Computation, costs: Costs, mesh: dict[str, int]
) -> Collective:
    collective = form.collective
    axes, ranks = group_of(collective, mesh=mesh)
    window = computation.instructions[form.issued + 1 : form.awaited]
    start = computation.instructions[form.issued]
    # A compiler that rewrites a reduction leaves the name of its operation to the addition.
    reducer = collective.computation("to_apply")
    return Collective(
        name=start.name,
        kind=_kind(collective, form.holder, fused=form.holder is not computation),
        op_name=collective.op_name or start.op_name or (reducer.root.op_name if reducer else ""),
        operands=_count_operands(collective, ranks=ranks),
        bytes=sum(operand.bytes for operand in _carried(collective)),
        axes=axes,
        ranks=ranks,
        computation=computation.name,
        executions=costs.trips[computation],
        issued=form.issued,
        awaited=form.awaited,
        operations=sum(i.opcode in ("fusion", "dot", "convolution", "custom-call") for i in window),
        flops=costs.flops_of(window),
        cycles=sum(map(costs.cycles, window)) if costs.total_cycles else None,
        kernels=sum(
            i.opcode == "custom-call" and "tpu_custom_call" in i.attributes for i in window
        ),
        scores=sum(map(attention_kernel_flops, window)),
    )


def _carried(collective: Instruction) -> tuple[Instruction, ...]:
    """Its operands; of a ragged all-to-all the rows alone, not the array that they are written to,
    nor their numbers and offsets.
    """
    ragged = collective.opcode.startswith("ragged-")
    return collective.operands[:1] if ragged else collective.operands


def _count_operands(collective: Instruction, *, ranks: int) -> int:
    """An all-to-all of one array may be written with an operand for each rank."""
    count = max(len(_carried(collective)), _concatenated_arrays(collective))
    return (
        count // ranks
        if "all-to-all" in collective.opcode and ranks and count % ranks == 0
        else count
    )


def _concatenated_arrays(collective: Instruction) -> int:
    """Number of arrays in the flat operand of `collective` that the compiler concatenated; 1 if it
    is one array, which the program itself may have concatenated.
    """
    source, *others = collective.operands
    if others or len(source.arrays) != 1 or len(source.dims) != 1:
        return 1
    source = source.behind(("bitcast",))
    if source.opcode == "fusion":
        source = source.calls[0].root
    joined = source.opcode == "concatenate" and not source.op_name.endswith("/concatenate")
    return len(source.operands) if joined else 1


def _kind(collective: Instruction, holder: Computation, *, fused: bool) -> str:
    kind = collective.opcode.removesuffix("-start")
    kept = holder.root.operands if holder.root.opcode == "tuple" else (holder.root,)
    sliced = fused and all(
        one.opcode == "dynamic-slice"
        and one.operands[0].behind(("get-tuple-element",)) is collective
        for one in kept
    )
    return "reduce-scatter" if kind == "all-reduce" and sliced else kind


# The mesh axes over which a collective runs. A program names them
# (`replica_groups=mesh['data'=1,'tensor'=4] {'tensor'}`; `{'tensor':(1)2}` are 2 of the 4), except in
# a collective that the compiler generated: that one lists device numbers, `{{0,4},{1,5},...}` or,
# shorter, `[4,2]<=[2,4]T(1,0)` or `mesh['axis_0'=2,'axis_1'=4] {'axis_0'}`, with names of its own.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_NAMELESS = "'axis_0'="


def mesh_of(program: Program) -> dict[str, int]:
    """Sizes of the mesh axes by name, read from the program's collectives; empty if none names
    them.
    """
    found = (_MESH.search(instruction.attributes) for instruction in program.instructions)
    return next((_sizes(named[1]) for named in found if named and _NAMELESS not in named[1]), {})


def group_of(collective: Instruction, *, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The axes, () if unknown, and the number of devices in a group, 0 if unknown."""
    if named := _MESH.search(collective.attributes):
        sizes = _sizes(named[1])
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        axes = () if any(part for _, part in parts) else tuple(axis for axis, _ in parts)
        if axes and _NAMELESS in named[1]:
            devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
            group = devices[tuple(slice(None) if axis in axes else 0 for axis in sizes)]
            axes = _axes_of(tuple(group.ravel().tolist()), mesh)
        return axes, math.prod(int(part) if part else sizes[axis] for axis, part in parts)
    first = _first_group(collective.attributes)
    return _axes_of(first, mesh), len(first)


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _first_group(attributes: str) -> tuple[int, ...]:
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", attributes):
        return _cycle(dict(map(_numbers, re.findall(r"\d+,\d+", pairs[1]))))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return _numbers(listed[1])
    if counted := re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        shape = _numbers(counted[3])
        order = _numbers(counted[4]) if counted[4] else range(len(shape))
        devices = np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()
        return tuple(devices[: int(counted[2])].tolist())
    return ()


def _cycle(target: dict[int, int]) -> tuple[int, ...]:
    """The devices that a permute's messages pass through from the first one that does not send to
    itself until they are back; () of a line.
    """
    first = next((source for source in target if target[source] != source), next(iter(target)))
    group = [first]
    while (following := target.get(group[-1])) != first:
        if following is None:
            return ()
        group.append(following)
    return tuple(sorted(group))


def _axes_of(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the mesh coordinates of a group differ; () unless the group covers these
    axes completely.
    """
    if not mesh or not group or max(group) >= math.prod(mesh.values()):
        return ()
    coordinates = np.unravel_index(group, tuple(mesh.values()))
    axes = tuple(axis for axis, indices in zip(mesh, coordinates) if len(set(indices)) > 1)
    return axes if math.prod(mesh[axis] for axis in axes) == len(group) else ()
