"""The mesh axes over which a collective runs.

A program names the axes (`replica_groups=mesh['data'=1,'fsdp'=2,'tensor'=4] {'fsdp'}`), except in a collective that
the compiler generated: that one lists device numbers, `{{0,4},{1,5},...}` or, shorter, `[4,2]<=[2,4]T(1,0)`.
"""

import dataclasses
import itertools
import math
import re

from ladder_jax.schedule.hlo import Instruction, Program

_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Groups:
    """axes: () if unknown. ranks: number of devices in a group, 0 if unknown."""

    axes: tuple[str, ...]
    ranks: int


def mesh_of(program: Program) -> dict[str, int]:
    """Sizes of the mesh axes by name, read from the program's collectives; empty if none names them."""
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
    if pairs := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", attributes):
        return _cycle(dict(tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", pairs[1])))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(map(int, listed[1].split(",")))
    if counted := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape = tuple(map(int, counted[3].split(",")))
        order = tuple(map(int, counted[4].split(","))) if counted[4] else tuple(range(len(shape)))
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        coordinates = itertools.product(*(range(shape[axis]) for axis in order))
        numbers = (sum(i * strides[axis] for i, axis in zip(indices, order)) for indices in coordinates)
        return tuple(itertools.islice(numbers, int(counted[2])))
    return ()


def _cycle(target: dict[int, int]) -> tuple[int, ...]:
    """The devices that a permute's messages pass through from the first one until they are back; () of a line."""
    first = next(iter(target))
    group = [first]
    while (following := target.get(group[-1])) != first:
        if following is None:
            return ()
        group.append(following)
    return tuple(sorted(group))


def _axes_of(group: tuple[int, ...], mesh: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the mesh coordinates of a group differ; () unless the group covers these axes completely."""
    if not group or max(group) >= math.prod(mesh.values()):
        return ()
    coordinates = []
    for number in group:
        indices = []
        for size in reversed(mesh.values()):
            number, index = divmod(number, size)
            indices.append(index)
        coordinates.append(indices[::-1])
    axes = tuple(axis for axis, indices in zip(mesh, zip(*coordinates)) if len(set(indices)) > 1)
    return axes if math.prod(mesh[axis] for axis in axes) == len(group) else ()
