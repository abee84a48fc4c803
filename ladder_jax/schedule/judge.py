"""Make the report of a scheduled program: classify each collective, and measure the compute in its window.

The classes are the sublayers' reductions over the tensor axis (with sequence parallelism, both halves of each), the
gathers of layers' weights and the reduce-scatters of their gradients over the fsdp axis, and all others. The class
follows from the library's named scope; of a collective that the compiler generated, from its kind and its mesh axes.
"""

import re
from collections.abc import Mapping, Sequence

from ladder_jax.parallel.collectives import ENTER, FOLLOWING, GATHER, LAUNCH, PREVIOUS, SCATTER
from ladder_jax.parallel.mesh import FSDP
from ladder_jax.schedule import collectives, purposes, rings
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, sublayer_of
from ladder_jax.schedule.grouped import Experts
from ladder_jax.schedule.hlo import Program
from ladder_jax.schedule.report import Other, Reduction, Report, Status, Transfer


def read(
    program: Program, *, sublayer_flops: Mapping[str, float] | None = None, experts: Experts | None = None
) -> Report:
    """The report of a scheduled program.

    `Report.reductions` are those that a residual topology launched; if there are none and `sublayer_flops` is None,
    all all-reduces and reduce-scatters.

    sublayer_flops: forward matmul FLOPs on one device of one "attention", "mlp" and "joint" (both) sublayer.
        Without it, a window is measured against the program's matmul FLOPs over its number of reductions.
    experts: the model's (see `cost.Costs`).
    """
    if not program.scheduled:
        raise ValueError("the program has not been scheduled: pass compiled.as_text(), not lowered.as_text()")
    costs = Costs(program, experts=experts)
    all_collectives = rings.joined(collectives.find(program, costs=costs), program=program, costs=costs)
    gathers = [c for c in all_collectives if sublayer_flops and _moves_layer_weights(c, GATHER, "all-gather")]
    scatters = [c for c in all_collectives if sublayer_flops and _moves_layer_weights(c, SCATTER, "reduce-scatter")]
    reduced = [c for c in all_collectives if LAUNCH in c.op_name or ENTER in c.op_name]
    if sublayer_flops is None and not reduced:
        reduced = [c for c in all_collectives if c.kind in ("all-reduce", "reduce-scatter")]
    flops = sublayer_flops or {}
    entry = program.entry
    total = sum(sum(costs.matmul_flops(i, within=entry).values()) for i in entry.instructions)
    mean = total / max(1, sum(c.executions * c.operands for c in reduced))
    default = flops.get("attention", mean)
    reductions = tuple(_reduction(c, flops, default) for c in reduced)
    # A collective over a single device moves nothing.
    others = [c for c in all_collectives if c not in reduced + gathers + scatters and c.ranks != 1]
    return Report(
        reductions=reductions,
        others=tuple(_other(c, flops, default) for c in others),
        step_cycles=costs.total_cycles(),
        flops=total,
        hidden_cycles=_hidden_cycles(reductions, program, costs) if costs.total_cycles() else None,
        gathers=tuple(_transfer(c, flops) for c in gathers),
        scatters=tuple(_transfer(c, flops) for c in scatters),
    )


def _moves_layer_weights(collective: Collective, scope: str, kind: str) -> bool:
    """Whether it moves a layer's weights or gradients: by its named scope or, if it has no name, by kind and axis."""
    if not collective.op_name:
        return collective.kind == kind and collective.axes == (FSDP,)
    return scope in collective.op_name and owner(collective.op_name)[0] != ""


def _transfer(collective: Collective, flops: Mapping[str, float]) -> Transfer:
    backward = "transpose(" in collective.op_name or not collective.op_name
    window = _window(collective, flops, flops["attention"]) / (2 if backward else 1)
    return Transfer(collective, owner(collective.op_name)[0], backward, window)


def _other(collective: Collective, flops: Mapping[str, float], default: float) -> Other:
    backward = "transpose(" in collective.op_name
    window = _window(collective, flops, default) / (2 if backward and flops else 1)
    return Other(collective, owner(collective.op_name)[0], backward, window, purposes.purpose(collective))


def _window(collective: Collective, sublayer_flops: Mapping[str, float], default: float) -> float:
    """The matmuls in the window, in forward sublayers."""
    return sum(flops / sublayer_flops.get(sublayer, default) for sublayer, flops in collective.flops.items())


def _reduction(collective: Collective, flops: Mapping[str, float], default: float) -> Reduction:
    name = collective.op_name
    backward = "transpose(" in name
    window = _window(collective, flops, default)
    if collective.kind == "all-to-all":  # beside attention, on TPUs often up to its kernel's end and no further
        window += collective.scores / flops.get("attention", default)
    layer, sublayer = owner(name)
    return Reduction(collective, layer, backward, window / 2 if backward and flops else window, sublayer)


def owner(op_name: str) -> tuple[str, str]:
    """(layer, sublayer) whose output or input the operation of that name reduces, scatters or gathers."""
    layers = re.findall(r"layers?_(\d+)(?:_to_(\d+))?", op_name)
    first, last = layers[-1] if layers else ("", "")
    layer, sublayer = (f"{first}-{last}" if last else first), sublayer_of(op_name)
    if f"{ENTER}/{FOLLOWING}" in op_name:
        if sublayer == "attention":
            return layer, "mlp"
        if not sublayer:
            return "last", ""
        after = "joint" if sublayer == "joint" else "attention"
        return (layer if last else str(int(first) + 1) if first else ""), after
    if f"{LAUNCH}/{PREVIOUS}" not in op_name:
        return layer, sublayer
    if sublayer == "mlp":
        return layer, "attention"
    if not sublayer:
        return "last", ""
    before = "joint" if sublayer == "joint" else "mlp"
    return (layer if last else str(int(first) - 1) if first else ""), before


def _hidden_cycles(reductions: Sequence[Reduction], program: Program, costs: Costs) -> int:
    """Cycles of all instructions in windows of hidden reductions; an instruction in two windows counts once."""
    total = 0
    messages = [part for r in reductions if r.status is Status.HIDDEN for part in r.collective.parts]
    for name, computation in program.computations.items():
        windows = [part for part in messages if part.computation == name]
        hidden_under = {index for c in windows for index in range(c.issued + 1, c.awaited)}
        cycles = [costs.cycles(computation.instructions[index], within=computation) or 0 for index in hidden_under]
        total += costs.trips(name) * sum(cycles)
    return total
