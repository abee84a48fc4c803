"""The rows that `make test` runs hold every pair that is promised."""

import itertools

from tests import covering

FACTORS = range(17), range(4), range(2)


def test_the_array_is_near_the_least():
    """No array of pairs is shorter than the product of its two longest factors."""
    chosen = covering.array(*FACTORS)
    assert not covering.uncovered(chosen, *FACTORS)
    assert len(chosen) <= 1.1 * 17 * 4
    assert covering.uncovered(chosen[1:], *FACTORS)
    assert not covering.uncovered(list(itertools.product(*FACTORS)), *FACTORS)


def test_rows_begin_with_the_array_and_are_the_product():
    """Of some pairs of columns; the others are marked."""
    rows = covering.rows(*FACTORS, pairs=[(1, 2)])
    run = [row.values for row in rows if not row.marks]
    assert len(run) == 17  # as often as the longest factor's every value needs
    assert not covering.uncovered(run, *FACTORS, pairs=[(1, 2)])
    assert run == [row.values for row in rows[:17]]
    assert {row.values for row in rows} == set(itertools.product(*FACTORS))
