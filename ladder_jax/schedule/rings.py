"""Rings: the permutes of one collective matmul, which the report counts as one gather or scatter.

A ring of n ranks moves n - 1 chunks, each beside the product of another chunk. It is hidden if at most an n-th of its
messages has less beside it than half of an n-th of the matmul that it feeds or drains. So each message of the library's
own rings must have that (see parallel/ring.py); those of XLA's, a loop, begin with one that has nothing beside it.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from ladder_jax.parallel.collectives import ENTER, LAUNCH, RING_GATHER, RING_SCATTER
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, Flops
from ladder_jax.schedule.hlo import Computation, Program

HALF = 0.5  # of an n-th of the matmul, beside each message


@dataclasses.dataclass(frozen=True)
class Ring(Collective):
    """The permutes of a gather or a scatter; `flops` and `cycles` are those of all their windows together.

    permutes: in issue order. matmul: FLOPs of the matmul that it feeds or drains.
    """

    permutes: tuple[Collective, ...] = ()
    matmul: float = 0.0

    @property
    def parts(self) -> tuple[Collective, ...]:
        return self.permutes

    @property
    def synchronous(self) -> bool:
        return all(one.synchronous for one in self.permutes)

    @property
    def covered(self) -> bool:
        enough = HALF * self.matmul / self.ranks
        bare = sum(one.executions for one in self.permutes if not 0 < enough <= sum(one.flops.values()))
        return bare * self.ranks <= sum(one.executions for one in self.permutes)


def joined(found: Sequence[Collective], *, program: Program, costs: Costs) -> list[Collective]:
    """`found` with a `Ring`, where its first permute was, in place of the permutes of each collective matmul."""
    groups = collections.defaultdict(list)
    for one in found:
        groups[_scope(one)].append(one)
    others = groups.pop("", [])
    rings = [_ring(scope, permutes, program, costs) for scope, permutes in groups.items()]
    places = {(one.computation, one.issued, one.awaited): place for place, one in enumerate(found)}
    first = lambda one: places[(one.parts[0].computation, one.parts[0].issued, one.parts[0].awaited)]
    return sorted([*others, *rings], key=first)


def _scope(one: Collective) -> str:
    """The scope of the collective matmul that a permute belongs to; "" of any other collective.

    XLA gives the permutes of its loops the name of the gather or scatter that they replace.
    """
    if one.kind != "collective-permute" or not (ENTER in one.op_name or LAUNCH in one.op_name):
        return ""
    own = max((RING_GATHER, RING_SCATTER), key=one.op_name.rfind)
    return one.op_name[: one.op_name.rindex(own) + len(own)] if own in one.op_name else one.op_name


def _ring(scope: str, permutes: list[Collective], program: Program, costs: Costs) -> Ring:
    messages, ranks = sum(one.executions for one in permutes), permutes[0].ranks
    holders = [program.computations[name] for name in dict.fromkeys(one.computation for one in permutes)]
    if scope.endswith((RING_GATHER, RING_SCATTER)):
        runs = max(1, round(messages / max(1, ranks - 1)))
        matmul = sum(costs.trips(h.name) * costs.flops_of_scope(scope, within=h) for h in holders)
    else:
        loops = [h for h in holders if not h.entry and h.name in _bodies(program)]
        runs = max(1, sum(costs.trips(_bodies(program)[h.name]) for h in loops))
        matmul = sum(costs.trips(h.name) * _matmuls(h, range(len(h.instructions)), costs).total() for h in loops)
    windows = [(h, _under(permutes, h)) for h in holders]
    flops, cycles = Flops(), None
    for holder, positions in windows:
        for sublayer, count in _matmuls(holder, positions, costs).items():
            flops[sublayer] += costs.trips(holder.name) * count / runs
        estimates = [costs.cycles(holder.instructions[n], within=holder) for n in positions]
        if any(estimate is not None for estimate in estimates):
            cycles = (cycles or 0) + costs.trips(holder.name) * sum(filter(None, estimates)) // runs
    changes = dict(
        operands=1,
        bytes=sum(one.executions * one.bytes for one in permutes) // runs,
        executions=runs,
        operations=sum(one.operations for one in permutes),
        kernels=sum(one.kernels for one in permutes),
        flops=flops,
        cycles=cycles,
        permutes=tuple(permutes),
        matmul=matmul / runs,
    )
    return Ring(**{**vars(permutes[0]), **changes})


def _bodies(program: Program) -> dict[str, str]:
    """Of each loop's body, the name of the computation that holds the loop."""
    return {
        instruction.calls[0]: computation.name
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    }


def _under(permutes: Sequence[Collective], holder: Computation) -> set[int]:
    here = [one for one in permutes if one.computation == holder.name]
    return {position for one in here for position in range(one.issued + 1, one.awaited)}


def _matmuls(holder: Computation, positions: Iterable[int], costs: Costs) -> Flops:
    return sum((costs.matmul_flops(holder.instructions[n], within=holder) for n in positions), Flops())
