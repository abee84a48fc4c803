"""Rings: the permutes of one collective matmul, which the report counts as one gather or scatter.

A ring of n ranks moves n - 1 chunks, each beside the product of another chunk. It is hidden if each
of its messages has beside it half of an n-th of the matmul that the ring feeds or drains (see
parallel/ring.py).
"""

import collections
import dataclasses
from collections.abc import Sequence

from ladder_jax.schedule import collectives
from ladder_jax.schedule.collectives import Collective
from ladder_jax.schedule.cost import Costs, Flops
from ladder_jax.scopes import RING_GATHER, RING_SCATTER

HALF = 0.5  # of an n-th of the matmul, beside each message


def covered(ring: Collective) -> bool:
    """Whether every message of a ring has enough compute beside it."""
    enough = HALF * ring.matmul / ring.ranks
    return all(0 < enough <= one.flops.total() for one in ring.permutes)


def joined(found: Sequence[Collective], *, costs: Costs) -> list[Collective]:
    """`found` with a ring, where its first permute was, in place of the permutes of each collective
    matmul.
    """
    groups = collections.defaultdict(list)
    for one in found:
        groups[_scope(one) or id(one)].append(one)
    return [
        _ring(key, group, costs) if isinstance(key, str) else group[0]
        for key, group in groups.items()
    ]


def _scope(one: Collective) -> str:
    """The scope of the collective matmul that a permute belongs to; "" of any other collective."""
    if one.kind != "collective-permute":
        return ""
    own = max((RING_GATHER, RING_SCATTER), key=one.op_name.rfind)
    return one.op_name[: one.op_name.rfind(own) + len(own)] if own in one.op_name else ""


def _ring(scope: str, permutes: list[Collective], costs: Costs) -> Collective:
    messages = sum(one.executions for one in permutes)
    runs = max(1, round(messages / max(1, permutes[0].ranks - 1)))
    matmul = costs.flops_of(costs.program.entry.instructions, scope=scope).total()
    flops = Flops()
    cycles = 0
    for trips, instruction in collectives.beside(permutes, costs=costs):
        for sublayer, count in costs.flops_of([instruction]).items():
            flops[sublayer] += trips * count / runs
        cycles += trips * costs.cycles(instruction)
    return dataclasses.replace(
        permutes[0],
        operands=1,
        bytes=sum(one.executions * one.bytes for one in permutes) // runs,
        executions=runs,
        operations=sum(one.operations for one in permutes),
        kernels=sum(one.kernels for one in permutes),
        flops=flops,
        cycles=cycles // runs if costs.total_cycles else None,
        permutes=tuple(permutes),
        matmul=matmul / runs,
    )
