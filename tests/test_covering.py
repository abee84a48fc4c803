"""The rows that `make test` runs hold every pair that it promises."""

import itertools

import pytest

from ladder_jax.config import Loop, Remat
from tests import cases, covering, test_chunks, test_decode, test_meshes, test_numerics

TOPOLOGY_MESH, TOPOLOGY_LOOP, MESH_LOOP, TOPOLOGY_REMAT, LOOP_REMAT = (0, 1), (0, 2), (1, 2), (0, 3), (2, 3)
TOPOLOGY_DEPARTURE = 0, 2  # among them the loop and each recomputation
THREE = [TOPOLOGY_MESH, TOPOLOGY_LOOP, MESH_LOOP]
ARRAYS = {
    "forward": (test_numerics.FORWARD, (cases.TOPOLOGIES, (1, 2, 4, 8), Loop), [TOPOLOGY_LOOP, MESH_LOOP]),
    "gradients": (
        test_numerics.GRADIENTS,
        (cases.TOPOLOGIES, [test_numerics.ONE_DEVICE, *test_numerics.MESHES], Loop, Remat),
        [*THREE, TOPOLOGY_REMAT],
    ),
    "sharded": (
        test_meshes.CASES,
        (test_meshes.TOPOLOGIES, test_meshes.MESHES, test_meshes.DEPARTURES),
        [TOPOLOGY_MESH, TOPOLOGY_DEPARTURE],
    ),
    "decode": (test_decode.CASES, (cases.TOPOLOGIES, test_decode.MESHES, Loop), [TOPOLOGY_LOOP, MESH_LOOP]),
    "chunks": (test_chunks.CASES, (cases.TOPOLOGIES, test_chunks.MESHES, Loop), [MESH_LOOP]),
}


def chosen(params) -> list[tuple]:
    return [param.values for param in params if not param.marks]


@pytest.mark.parametrize("name", ARRAYS)
def test_every_pair_is_run(name):
    params, factors, pairs = ARRAYS[name]
    run = chosen(params)
    assert not covering.uncovered(run, *factors, pairs=pairs)
    assert len(run) < len(params) and len(set(map(str, run))) == len(run)  # it saves something
    # The control: without one of its rows a pair is missing.
    assert any(covering.uncovered(run[:i] + run[i + 1 :], *factors, pairs=pairs) for i in range(len(run)))


def test_every_pair_of_a_program_that_communicates():
    """A single device's program has no all-reduces to count: the other rows hold all pairs by themselves."""
    run = [row for row in chosen(test_numerics.GRADIENTS) if row[1] != test_numerics.ONE_DEVICE]
    factors = cases.TOPOLOGIES, test_numerics.MESHES, Loop, Remat
    assert not covering.uncovered(run, *factors, pairs=[*THREE, TOPOLOGY_REMAT, LOOP_REMAT])


def test_the_array_is_near_the_least():
    """No array of pairs is shorter than the product of its two longest factors."""
    factors = range(17), range(4), range(2)
    chosen = covering.array(*factors)
    assert not covering.uncovered(chosen, *factors) and len(chosen) <= 1.1 * 17 * 4
    assert covering.uncovered(chosen[1:], *factors)
    assert not covering.uncovered(list(itertools.product(*factors)), *factors)
