"""What the rows' losses say, as numbers: over the control of the same seed, and over the original."""

import itertools

from experiments.distil.plan import RATE, RATES, Layers, Recipe, Row, Start
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
