"""Rings: the permutes of one collective matmul, which the report counts as one gather or scatter.

A ring of n ranks moves n - 1 chunks, each beside the product of another chunk. It is hidden if at
most an n-th of its messages has less beside it than half of an n-th of the matmul that it feeds or
drains. So each message of the library's own rings must have that (see parallel/ring.py); those of
XLA's, a loop, begin with one that has nothing beside it.
"""

import collections
import dataclasses
from collections.abc import Sequence

from ladder_jax.schedule import collectives
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, Flops
from ladder_jax.schedule.hlo import Program
from ladder_jax.scopes import ENTER, LAUNCH, RING_GATHER, RING_SCATTER

HALF = 0.5  # of an n-th of the matmul, beside each message


def covered(ring: Collective) -> bool:
    """Whether enough of a ring's messages have compute beside them."""
    enough = HALF * ring.matmul / ring.ranks
    bare = sum(one.executions for one in ring.permutes if not 0 < enough <= one.flops.total())
    return bare * ring.ranks <= sum(one.executions for one in ring.permutes)


def joined(found: Sequence[Collective], *, program: Program, costs: Costs) -> list[Collective]:
    """`found` with a ring, where its first permute was, in place of the permutes of each collective
    matmul.
    """
    groups = collections.defaultdict(list)
    for one in found:
        groups[_scope(one) or id(one)].append(one)
    return [
        _ring(key, group, program, costs) if isinstance(key, str) else group[0]
        for key, group in groups.items()
    ]


def _scope(one: Collective) -> str:
    """The scope of the collective matmul that a permute belongs to; "" of any other collective.

    XLA gives the permutes of its loops the name of the gather or scatter that they replace.
    """
    if one.kind != "collective-permute" or not (ENTER in one.op_name or LAUNCH in one.op_name):
        return ""
    own = max((RING_GATHER, RING_SCATTER), key=one.op_name.rfind)
    return one.op_name[: one.op_name.rindex(own) + len(own)] if own in one.op_name else one.op_name


def _ring(scope: str, permutes: list[Collective], program: Program, costs: Costs) -> Collective:
    messages = sum(one.executions for one in permutes)
    ranks = permutes[0].ranks
    holders = [
        program.computations[name] for name in dict.fromkeys(one.computation for one in permutes)
    ]
    if scope.endswith((RING_GATHER, RING_SCATTER)):
        runs = max(1, round(messages / max(1, ranks - 1)))
        matmul = sum(costs.trips(h) * costs.flops_of_scope(scope, within=h) for h in holders)
    else:
        loops_of = lambda c: [one for one in c.instructions if one.opcode == "while"]
        around = {loop.calls[0]: c for c in program.computations.values() for loop in loops_of(c)}
        loops = [h for h in holders if h in around]
        runs = max(1, sum(costs.trips(around[h]) for h in loops))
        matmul = sum(costs.trips(h) * costs.flops_of(h.instructions).total() for h in loops)
    flops = Flops()
    estimates = []
    for trips, instruction in collectives.beside(permutes, program=program, costs=costs):
        for sublayer, count in costs.matmul_flops(instruction).items():
            flops[sublayer] += trips * count / runs
        if (estimate := costs.cycles(instruction)) is not None:
            estimates.append(trips * estimate)
    return dataclasses.replace(
        permutes[0],
        operands=1,
        bytes=sum(one.executions * one.bytes for one in permutes) // runs,
        executions=runs,
        operations=sum(one.operations for one in permutes),
        kernels=sum(one.kernels for one in permutes),
        flops=flops,
        cycles=sum(estimates) // runs if estimates else None,
        permutes=tuple(permutes),
        matmul=matmul / runs,
    )
