"""The rows that `make test` runs hold every pair that it promises."""

import itertools

import pytest

from ladder_jax.config import Loop, Remat
from tests import cases, covering, test_decode, test_numerics, test_program

TOPOLOGY_MESH, TOPOLOGY_LOOP, MESH_LOOP, TOPOLOGY_REMAT = (0, 1), (0, 2), (1, 2), (0, 3)
THREE = [TOPOLOGY_MESH, TOPOLOGY_LOOP, MESH_LOOP]
ARRAYS = {
    "forward": (test_numerics.FORWARD, (cases.TOPOLOGIES, (1, 2, 4, 8), Loop), THREE),
    "gradients": (
        test_numerics.GRADIENTS,
        (cases.TOPOLOGIES, test_numerics.MESHES, Loop, Remat),
        [*THREE, TOPOLOGY_REMAT],
    ),
    "decode": (test_decode.CASES, (cases.TOPOLOGIES, test_decode.MESHES, Loop), THREE),
    "programs": (test_program.BACKWARD, (test_program.A_LAYER, Loop, Remat), [(0, 1), (0, 2), (1, 2)]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_every_pair_is_run(name):
    params, factors, pairs = ARRAYS[name]
    run = [param.values for param in params if not param.marks]
    assert not covering.uncovered(run, *factors, pairs=pairs)
    assert len(run) < len(params)  # it saves something
    # The control: without one of its rows a pair is missing.
    assert any(covering.uncovered(run[:i] + run[i + 1 :], *factors, pairs=pairs) for i in range(len(run)))


def test_the_array_is_near_the_least():
    """No array of pairs is shorter than the product of its two longest factors."""
    factors = range(17), range(4), range(2)
    chosen = covering.array(*factors)
    assert not covering.uncovered(chosen, *factors) and len(chosen) <= 1.1 * 17 * 4
    assert covering.uncovered(chosen[1:], *factors)
    assert not covering.uncovered(list(itertools.product(*factors)), *factors)
