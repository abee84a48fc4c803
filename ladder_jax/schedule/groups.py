"""Which devices a collective goes over, as axes of the mesh.

A program names the axes (`replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp'}`), except where the compiler
made the collective up: there stand the devices' numbers, `{{0,4},{1,5},...}` or, shorter, `[4,2]<=[2,4]T(1,0)`.
"""

import dataclasses
import itertools
import math
import re

from ladder_jax.schedule.hlo import Instruction, Program

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Groups:
    """axes: () where unknown. ranks: devices in a group, 0 where unknown."""

    axes: tuple[str, ...]
    ranks: int


def mesh_of(program: Program) -> dict[str, int]:
    """The axes of the mesh and their sizes, as the program's collectives name them; empty where none does."""
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if named := _MESH.search(instruction.attributes):
                return _sizes(named[1])
    return {}


def parse(collective: Instruction, *, mesh: dict[str, int]) -> Groups:
    if named := _MESH.search(collective.attributes):
        axes, sizes = tuple(re.findall(r"'([^']+)'", named[2])), _sizes(named[1])
        return Groups(axes, math.prod(sizes[axis] for axis in axes))
    first = _first_group(collective.attributes)
    return Groups(_axes_of(first, mesh), len(first))


def _sizes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}


def _first_group(attributes: str) -> tuple[int, ...]:
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(map(int, listed[1].split(",")))
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape = tuple(map(int, counted[3].split(",")))
        order = tuple(map(int, counted[4].split(","))) if counted[4] else tuple(range(len(shape)))
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        places = itertools.product(*(range(shape[axis]) for axis in order))
        numbers = (sum(i * strides[axis] for i, axis in zip(place, order)) for place in places)
        return tuple(itertools.islice(numbers, int(counted[2])))
    return ()


def _axes_of(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the places of these devices differ, if the group is all that differ in those alone."""
    if not group or max(group) >= math.prod(mesh.values()):
        return ()
    places = []
    for number in group:
        place = []
        for size in reversed(mesh.values()):
            number, index = divmod(number, size)
            place.append(index)
        places.append(place[::-1])
    axes = tuple(axis for axis, indices in zip(mesh, zip(*places)) if len(set(indices)) > 1)
    return axes if math.prod(mesh[axis] for axis in axes) == len(group) else ()
