"""The collectives of a scheduled program, and the compute that the schedule places beside each.

A collective is *synchronous* (the device waits) or has a *window*: the instructions issued between its start and its
done (see forms.py). On TPUs a reduce-scatter may be one fusion of an all-reduce and the slice that this device keeps.
"""

import dataclasses

from ladder_jax.schedule import groups, hlo
from ladder_jax.schedule.cost import Costs, Flops, attention_kernel_flops
from ladder_jax.schedule.forms import Form, forms, scheduled
from ladder_jax.schedule.hlo import Computation, Instruction, Program


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, and its position in the schedule.

    operands: number of arrays that it carries; an all-reduce of several arrays is a merged one. The compiler for
        NVIDIA GPUs concatenates arrays into one flat operand; this counts the arrays in it.
    operand_op_names: names of the operations that computed the operands, if there are several (a compiler for TPUs
        keeps only one name for the merged collective itself).
    bytes: size of its operands on one device: unscattered arrays of a reduce-scatter, shards of an all-gather.
    axes: mesh axes that it spans, such as ("tensor",); empty if the program does not name them.
    ranks: number of devices in its group; 0 if unknown.
    executions: runs per execution of the program; inside the loop over new tokens, runs per token.
    issued, awaited: positions of its start and its done in `computation`; equal if it is synchronous.
    operations: number of computing instructions in its window.
    flops: matmul FLOPs in its window, by sublayer.
    cycles: the compiler's estimate of the window's time; None if it gives none.
    kernels: number of opaque (Pallas) kernels in its window.
    scores: FLOPs of kernels of attention among them.
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
    operand_op_names: tuple[str, ...] = ()
    scores: int = 0

    @property
    def synchronous(self) -> bool:
        return self.issued == self.awaited

    @property
    def parts(self) -> tuple["Collective", ...]:
        """The messages whose windows are its own: itself, or a ring's permutes."""
        return (self,)


def find(program: Program, *, costs: Costs) -> list[Collective]:
    """All collectives that run: computation by computation, each in issue order."""
    mesh = groups.mesh_of(program)
    return [
        _measure(form, computation, program, costs, mesh)
        for computation in scheduled(program)
        for form in forms(computation, program)
    ]


def _measure(form: Form, computation: Computation, program: Program, costs: Costs, mesh: dict[str, int]) -> Collective:
    collective, holder = form.collective, form.holder
    group = groups.parse(collective, mesh=mesh)
    payload = tuple(a for name in collective.operands for a in holder.by_name[name].arrays)
    if collective.opcode.startswith("collective-permute"):  # an operand may be one array of a fusion's several
        payload = collective.arrays[: len(collective.operands)]
    window = computation.instructions[form.issued + 1 : form.awaited]
    cycles = [costs.cycles(i, within=computation) for i in window]
    estimates = [c for c in cycles if c is not None]
    start = computation.instructions[form.issued]
    return Collective(
        name=start.name,
        kind=_kind(collective, holder),
        op_name=collective.op_name
        or computation.instructions[form.issued].op_name
        or _reducer_op_name(collective, program),
        operands=_count_operands(collective, holder, program, ranks=group.ranks),
        bytes=hlo.size_in_bytes(payload),
        axes=group.axes,
        ranks=group.ranks,
        computation=computation.name,
        executions=costs.trips(computation.name),
        issued=form.issued,
        awaited=form.awaited,
        operations=sum(i.opcode in ("fusion", "dot", "convolution", "custom-call") for i in window),
        flops=sum((costs.matmul_flops(i, within=computation) for i in window), Flops()),
        cycles=sum(estimates) if estimates or (not window and costs.total_cycles()) else None,
        kernels=sum(i.opcode == "custom-call" and "tpu_custom_call" in i.attributes for i in window),
        operand_op_names=_operand_op_names(collective, holder) if len(collective.operands) > 1 else (),
        scores=sum(attention_kernel_flops(i, within=computation) for i in window),
    )


def _count_operands(collective: Instruction, holder: Computation, program: Program, *, ranks: int) -> int:
    """An all-to-all of one array may be written with an operand for each rank."""
    count = max(len(collective.operands), _concatenated_arrays(collective, holder, program))
    return count // ranks if "all-to-all" in collective.opcode and ranks and count % ranks == 0 else count


def _operand_op_names(collective: Instruction, holder: Computation) -> tuple[str, ...]:
    op_names = []
    for name in collective.operands:
        source = holder.by_name[name]
        while not source.op_name and source.opcode in _MOVES:
            source = holder.by_name[source.operands[0]]
        op_names.append(source.op_name)
    return tuple(op_names)


_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element")


def _concatenated_arrays(collective: Instruction, holder: Computation, program: Program) -> int:
    """Number of arrays in the flat operand of `collective` that the compiler concatenated; 1 if it is one array."""
    name, *others = collective.operands
    source = holder.by_name[name]
    if others or len(source.arrays) != 1 or len(source.arrays[0][1]) != 1:
        return 1
    while source.opcode == "bitcast":
        source = holder.by_name[source.operands[0]]
    if source.opcode == "fusion":
        source = program.computations[source.calls[0]].instructions[-1]
    return len(source.operands) if source.opcode == "concatenate" else 1


def _reducer_op_name(collective: Instruction, program: Program) -> str:
    """The name of the original operation of a reduction that the compiler rewrote: its addition keeps that name."""
    reducer = program.computations.get((collective.attribute("to_apply") or "").lstrip("%"))
    return reducer.instructions[-1].op_name if reducer else ""


def _kind(collective: Instruction, holder: Computation) -> str:
    kind, root = collective.opcode.removesuffix("-start"), holder.instructions[-1]
    sliced = not holder.entry and root.opcode == "dynamic-slice" and root.operands[0] == collective.name
    return "reduce-scatter" if kind == "all-reduce" and sliced else kind
