"""Covering arrays: few rows of a product of factors in which every pair of values still appears.

A fault that one value causes, or two together, shows in some row (Kuhn, Wallace & Gallo 2004 found
nearly all faults of real programs to need no more). `make test` runs those rows; the others are
marked `full`: `make test-all`.
"""

import collections
import functools
import itertools

import pytest


def array(*factors, pairs=None, even=()):
    """Rows in which every value appears, and every pair of values of two columns, or of the columns
    in `pairs`.

    Of rows that add as many of these, the one whose values of the columns `even` are the rarest;
    then the first.
    """
    columns = _columns(len(factors), pairs)
    product = [(row, _covered(row, columns=columns)) for row in itertools.product(*factors)]
    # As bits, which are counted fast: of each row once for every row that is chosen.
    every = set().union(*(covered for _, covered in product))
    bit = {pair: 1 << place for place, pair in enumerate(every)}
    bits = [(row, sum(bit[pair] for pair in covered)) for row, covered in product]
    missing = sum(bit.values())
    rows = []
    while missing:
        most = max((covered & missing).bit_count() for _, covered in bits)
        best = [one for one in bits if (one[1] & missing).bit_count() == most]
        used = collections.Counter((i, str(row[i])) for row in rows for i in even)
        row, covered = min(best, key=lambda one: sum(used[i, str(one[0][i])] for i in even))
        rows.append(row)
        missing &= ~covered
    return rows


def rows(*factors, pairs=None, even=()):
    """The product for `pytest.mark.parametrize`, what is not in the array marked `full`."""
    return marked(
        itertools.product(*map(tuple, factors)), chosen=array(*factors, pairs=pairs, even=even)
    )


def full(*row):
    """A row for `pytest.mark.parametrize` that is marked `full`."""
    return pytest.param(*row, marks=pytest.mark.full)


def marked(product, *, chosen):
    """These rows for `pytest.mark.parametrize`, `chosen` first, the others marked `full`."""
    each = {str(row): row for row in product}.values()
    others = [row for row in each if row not in chosen]
    return [
        *(pytest.param(*row) for row in chosen),
        *(full(*row) for row in others),
    ]


def uncovered(chosen, *factors, pairs=None):
    """What these rows lack: (column, value, column, value)."""
    covered = functools.partial(_covered, columns=_columns(len(factors), pairs))
    return set().union(*map(covered, itertools.product(*map(tuple, factors)))) - set().union(
        *map(covered, chosen)
    )


def _columns(count, pairs):
    """Those to cover; a column of its own covers single values."""
    return [
        *(itertools.combinations(range(count), 2) if pairs is None else pairs),
        *((i, i) for i in range(count)),
    ]


def _covered(row, *, columns):
    return {(i, str(row[i]), j, str(row[j])) for i, j in columns}
