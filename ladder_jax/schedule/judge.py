"""A scheduled program to its report: whose communication each collective is, and how much stands beside it.

Told apart by the scopes in which the library communicates, or, where a compiler made a collective up, by the mesh
axes that it spans: the sublayers' reductions over the tensor ranks (with sequence parallelism, both halves of each),
the gathers of layers' weights and the scatters of their gradients over the fsdp axis, and the rest.
"""

import re
from collections.abc import Mapping, Sequence

from ladder_jax.parallel.collectives import ENTER, FOLLOWING, GATHER, LAUNCH, PREVIOUS, SCATTER
from ladder_jax.parallel.mesh import FSDP
from ladder_jax.schedule import collectives, purposes
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, sublayer_of
from ladder_jax.schedule.hlo import Program
from ladder_jax.schedule.report import Other, Reduction, Report, Status, Transfer


def read(program: Program, *, sublayer_flops: Mapping[str, float] | None = None) -> Report:
    """The report of a scheduled program.

    sublayer_flops: matmul FLOPs, forward on one device, of one "attention", "mlp" and "joint" (both).
        Without it a window is measured against the program's matmul FLOPs divided by the number of reductions.

    Judged are the reductions that a residual topology launched; where none did, every all-reduce and reduce-scatter.
    """
    if not program.scheduled:
        raise ValueError("the program has not been scheduled: pass compiled.as_text(), not lowered.as_text()")
    costs = Costs(program)
    found = collectives.find(program, costs=costs)
    gathers = [c for c in found if sublayer_flops and _owned(c, GATHER, "all-gather")]
    scatters = [c for c in found if sublayer_flops and _owned(c, SCATTER, "reduce-scatter")]
    judged = [c for c in found if LAUNCH in c.op_name or ENTER in c.op_name]
    if sublayer_flops is None and not judged:
        judged = [c for c in found if c.kind in ("all-reduce", "reduce-scatter")]
    scale = sublayer_flops or {}
    entry = program.entry
    total = sum(sum(costs.matmul_flops(i, within=entry).values()) for i in entry.instructions)
    mean = total / max(1, sum(c.executions * c.operands for c in judged))
    mean = scale.get("attention", mean)
    reductions = tuple(_reduction(c, scale, mean) for c in judged)
    # One over a single device is in the program, and moves nothing.
    others = [c for c in found if c not in judged + gathers + scatters and c.ranks != 1]
    return Report(
        reductions=reductions,
        others=tuple(_other(c, scale, mean) for c in others),
        step_cycles=costs.total_cycles(),
        hidden_cycles=_hidden_cycles(reductions, program, costs) if costs.total_cycles() else None,
        gathers=tuple(_transfer(c, scale) for c in gathers),
        scatters=tuple(_transfer(c, scale) for c in scatters),
    )


def _owned(collective: Collective, scope: str, kind: str) -> bool:
    """Whether it moves a layer's weights, by its scope or, made up by the compiler, by its kind and axis."""
    if not collective.op_name:
        return collective.kind == kind and collective.axes == (FSDP,)
    return scope in collective.op_name and owner(collective.op_name)[0] != ""


def _transfer(collective: Collective, scale: Mapping[str, float]) -> Transfer:
    backward = "transpose(" in collective.op_name or not collective.op_name
    window = _window(collective, scale, scale["attention"]) / (2 if backward else 1)
    return Transfer(collective, owner(collective.op_name)[0], backward, window)


def _other(collective: Collective, scale: Mapping[str, float], mean: float) -> Other:
    backward = "transpose(" in collective.op_name
    window = _window(collective, scale, mean) / (2 if backward and scale else 1)
    return Other(collective, owner(collective.op_name)[0], backward, window, purposes.purpose(collective))


def _window(collective: Collective, scale: Mapping[str, float], otherwise: float) -> float:
    return sum(flops / scale.get(sublayer, otherwise) for sublayer, flops in collective.flops.items())


def _reduction(collective: Collective, scale: Mapping[str, float], mean: float) -> Reduction:
    name = collective.op_name
    backward = "transpose(" in name
    window = _window(collective, scale, mean)
    layer, sublayer = owner(name)
    return Reduction(collective, layer, backward, window / 2 if backward and scale else window, sublayer)


def owner(op_name: str) -> tuple[str, str]:
    """(layer, sublayer) of the output or input that the operation called so reduces, scatters or gathers."""
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
    """Each instruction once, however many windows it stands in."""
    total = 0
    for name, computation in program.computations.items():
        windows = [r.collective for r in reductions if r.collective.computation == name and r.status is Status.HIDDEN]
        inside = {index for c in windows for index in range(c.issued + 1, c.awaited)}
        cycles = [costs.cycles(computation.instructions[index], within=computation) or 0 for index in inside]
        total += costs.trips(name) * sum(cycles)
    return total
