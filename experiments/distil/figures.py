"""What the rows' losses say, as numbers: over the control of the same seed, over the original, and between two rows."""

import dataclasses
import itertools

from experiments.distil.plan import RATE, RATES, SEEDS, Layers, Recipe, Row, Start
from experiments.pretrain.figures import Spread


def measured(results: dict) -> dict[Row, float]:
    """The held-out loss of each row."""
    return {_row(row): row["loss"] for row in results["rows"]}


def control(row: Row) -> Row:
    """The original, retrained likewise; of a row that is not retrained, the original."""
    return Row(row.seed, Layers.NONE, Start.PLAIN, row.recipe, row.share, row.rate)


def original(row: Row) -> Row:
    return Row(row.seed)


def over(losses: dict[Row, float], row: Row, *, other=control) -> Spread | None:
    """The row's loss less that of its `other`, over the seeds that have both; None where no seed has."""
    rows = [one for one in losses if seedless(one) == seedless(row) and other(one) in losses]
    return Spread(tuple(losses[one] - losses[other(one)] for one in rows)) if rows else None


def between(losses: dict[Row, float], row: Row, other: Row) -> Spread | None:
    """What the row leaves over its control, less what `other` leaves over its own, by seed; None where none has all."""
    pairs = [[dataclasses.replace(one, seed=seed) for one in (row, other)] for seed in SEEDS]
    have = [pair for pair in pairs if all(one in losses and control(one) in losses for one in pair)]
    left = lambda one: losses[one] - losses[control(one)]
    return Spread(tuple(left(mine) - left(theirs) for mine, theirs in have)) if have else None


def seedless(row: Row) -> tuple:
    return row.layers, row.start, row.recipe, row.share, round(row.rate, 3)


def kinds(losses: dict[Row, float]) -> list[tuple[Layers, Start, Recipe]]:
    """The kinds of rows that were retrained at the usual rate, controls among them, in the order of the enums."""
    found = {(row.layers, row.start, row.recipe) for row in _usual(losses)}
    return [kind for kind in itertools.product(Layers, Start, Recipe) if kind in found]


def shares(losses: dict[Row, float]) -> list[float]:
    return sorted({row.share for row in _usual(losses)})


def rates(losses: dict[Row, float]) -> list[float]:
    return sorted({row.rate for row in losses if row.recipe is not Recipe.NONE})


def _usual(losses: dict[Row, float]) -> list[Row]:
    return [row for row in losses if row.recipe is not Recipe.NONE and row.rate == RATE]


def _row(found: dict) -> Row:
    words = Layers(found["layers"]), Start(found["start"]), Recipe(found["recipe"])
    if words[-1] is Recipe.NONE:
        return Row(found["seed"], *words)
    rate = next((rate for rate in RATES if abs(found["rate"] - rate) < 1e-3), found["rate"])
    return Row(found["seed"], *words, found["share"], rate)
