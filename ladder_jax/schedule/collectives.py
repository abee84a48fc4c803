"""Where a scheduled program communicates, and what it computes meanwhile.

A collective is *synchronous* (the device waits) or has a *window*: the instructions that are issued
between its start and its done (see forms.py). A reduce-scatter may also be an all-reduce and the slice
that this device keeps, in one fusion (TPU).
"""

import dataclasses

from ladder_jax.schedule import groups, hlo
from ladder_jax.schedule.cost import Costs, Flops
from ladder_jax.schedule.forms import Form, forms, scheduled
from ladder_jax.schedule.hlo import Computation, Instruction, Program


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, where it stands in the schedule.

    operands: how many arrays it carries; an all-reduce of several is a merged one. The compiler for
        NVIDIA GPUs joins them into one flat array instead, and those are counted too.
    joined: the names of what computed them, where there are several: one name is all that a compiler for TPUs keeps.
    bytes: of those arrays, on one device, before it: whole ones to be scattered, shares to be gathered.
    axes: mesh axes that it spans, such as ("tensor",); empty where the program does not say.
    ranks: over how many devices it goes, 0 where the program does not say.
    executions: how often it runs in one execution of the program; of a loop over new tokens, for one of them.
    issued, awaited: positions of its start and its done in `computation`; equal if it is synchronous.
    operations, flops, cycles, kernels: of the instructions between them: how many compute, the FLOPs of
        matrix products by sublayer, the compiler's estimate of their time (None where it gives none),
        and how many opaque kernels there are among them.
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
    joined: tuple[str, ...] = ()

    @property
    def synchronous(self) -> bool:
        return self.issued == self.awaited


def find(program: Program, *, costs: Costs) -> list[Collective]:
    """All collectives that run, in issue order computation by computation."""
    found, mesh = [], groups.mesh_of(program)
    for computation in scheduled(program):
        for form in forms(computation, program):
            found.append(_measure(form, computation, program, costs, mesh))
    return found


def _measure(form: Form, computation: Computation, program: Program, costs: Costs, mesh: dict[str, int]) -> Collective:
    collective, holder = form.collective, form.holder
    members = groups.parse(collective, mesh=mesh)
    payload = tuple(a for name in collective.operands for a in holder.by_name[name].arrays)
    window = computation.instructions[form.issued + 1 : form.awaited]
    cycles = [costs.cycles(i, within=computation) for i in window]
    known = [c for c in cycles if c is not None]
    return Collective(
        name=computation.instructions[form.issued].name,
        kind=_kind(collective, holder),
        op_name=collective.op_name or computation.instructions[form.issued].op_name or _of_reducer(collective, program),
        operands=max(len(collective.operands), _joined(collective, holder, program)),
        bytes=hlo.size_in_bytes(payload),
        axes=members.axes,
        ranks=members.ranks,
        computation=computation.name,
        executions=costs.trips(computation.name),
        issued=form.issued,
        awaited=form.awaited,
        operations=sum(i.opcode in ("fusion", "dot", "convolution", "custom-call") for i in window),
        flops=sum((costs.matmul_flops(i, within=computation) for i in window), Flops()),
        cycles=sum(known) if known or (not window and costs.total_cycles()) else None,
        kernels=sum(i.opcode == "custom-call" and "tpu_custom_call" in i.attributes for i in window),
        joined=_names(collective, holder) if len(collective.operands) > 1 else (),
    )


def _names(collective: Instruction, holder: Computation) -> tuple[str, ...]:
    found = []
    for name in collective.operands:
        source = holder.by_name[name]
        while not source.op_name and source.opcode in _MOVES:
            source = holder.by_name[source.operands[0]]
        found.append(source.op_name)
    return tuple(found)


_MOVES = ("copy", "copy-start", "copy-done", "bitcast", "get-tuple-element")


def _joined(collective: Instruction, holder: Computation, program: Program) -> int:
    """How many arrays were concatenated into the flat one that `collective` carries; 1 if none were."""
    name, *others = collective.operands
    source = holder.by_name[name]
    if others or len(source.arrays) != 1 or len(source.arrays[0][1]) != 1:
        return 1
    while source.opcode == "bitcast":
        source = holder.by_name[source.operands[0]]
    if source.opcode == "fusion":
        source = program.computations[source.calls[0]].instructions[-1]
    return len(source.operands) if source.opcode == "concatenate" else 1


def _of_reducer(collective: Instruction, program: Program) -> str:
    """What a reduction that the compiler rewrote was made from: its addition still says so."""
    reducer = program.computations.get((collective.attribute("to_apply") or "").lstrip("%"))
    return reducer.instructions[-1].op_name if reducer else ""


def _kind(collective: Instruction, holder: Computation) -> str:
    kind, kept = collective.opcode.removesuffix("-start"), holder.instructions[-1]
    sliced = not holder.entry and kept.opcode == "dynamic-slice" and kept.operands[0] == collective.name
    return "reduce-scatter" if kind == "all-reduce" and sliced else kind
