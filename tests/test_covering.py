"""The rows that `make test` runs hold every pair that it promises."""

import itertools

import pytest

from ladder_jax.config import Loop, Remat
from tests import (
    cases,
    covering,
    test_chunks,
    test_decode,
    test_gradients_bfloat16,
    test_interleave,
    test_meshes,
    test_numerics,
)

FIRST_SECOND = (0, 1)
FIRST_THIRD = (0, 2)
SECOND_THIRD = (1, 2)
THIRD_FOURTH = (2, 3)
ARRAYS = {
    "forward": (test_numerics.FORWARD, (cases.TOPOLOGIES, (1, 2, 4, 8), Loop), [SECOND_THIRD]),
    "gradients": (
        test_numerics.GRADIENTS,
        (cases.TOPOLOGIES, test_numerics.MESHES, Loop, Remat),
        [SECOND_THIRD, THIRD_FOURTH],
    ),
    "gradients that communicate": (
        test_numerics.GRADIENTS,
        (cases.RECURRENCES, test_numerics.MESHES, Loop, Remat),
        [FIRST_THIRD, THIRD_FOURTH],
    ),
    "sharded": (
        test_meshes.CASES,
        (["ladder"], test_meshes.MESHES, test_meshes.DEPARTURES),
        [FIRST_SECOND, FIRST_THIRD],
    ),
    "halves": (
        test_interleave.GRADIENTS,
        (test_interleave.RECURRENCES, test_interleave.FORMS, Loop, test_interleave.REMATS),
        [SECOND_THIRD],
    ),
    "summed": (
        test_gradients_bfloat16.TRACED,
        (test_gradients_bfloat16.CASES, test_gradients_bfloat16.REMATS, Loop),
        [SECOND_THIRD],
    ),
    "decode": (test_decode.CASES, (cases.TOPOLOGIES, test_decode.MESHES, Loop), [SECOND_THIRD]),
    "chunks": (test_chunks.CASES, (cases.RECURRENCES, test_chunks.MESHES, Loop), [SECOND_THIRD]),
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
    assert any(
        covering.uncovered(run[:i] + run[i + 1 :], *factors, pairs=pairs) for i in range(len(run))
    )


def test_the_array_is_near_the_least():
    """No array of pairs is shorter than the product of its two longest factors."""
    factors = range(17), range(4), range(2)
    chosen = covering.array(*factors)
    assert not covering.uncovered(chosen, *factors)
    assert len(chosen) <= 1.1 * 17 * 4
    assert covering.uncovered(chosen[1:], *factors)
    assert not covering.uncovered(list(itertools.product(*factors)), *factors)
