"""The README's tables and the figures, from SIZE.json."""

import dataclasses
import json
import pathlib

from experiments.distil import figures, plan
from experiments.distil.figures import control, original, over
from experiments.distil.plan import Layers, Recipe, Row, Start
from experiments.pretrain.figures import Spread
from experiments.pretrain.tables import table
from experiments.readme import fill
from ladder_jax import files
from ladder_jax.errors import UserError


def write(folder: pathlib.Path) -> None:
    """README.md's tables (if it is there) and SIZE.png beside each `folder`/SIZE.json; prints the tables.

    Raises UserError where there are no results.
    """
    from experiments.distil import picture

    found = {size: folder / f"{size}.json" for size in plan.SIZES if (folder / f"{size}.json").is_file()}
    if not found:
        raise UserError(f"there is no {str(folder / 'small.json')!r}: run the study first, without --tables")
    for size, file in found.items():
        results = json.loads(file.read_text())
        named = {f"{size}-{name}": text for name, text in sections(results).items()}
        print("\n\n".join(f"{name}\n\n{text}" for name, text in named.items()))
        readme = folder / "README.md"
        if readme.is_file():
            text = fill(readme.read_text(), named)
            files.write_atomically(str(readme), lambda path, text=text: pathlib.Path(path).write_text(text))
        picture.plot(results, file=str(folder / f"{size}.png"))


def sections(results: dict) -> dict[str, str]:
    """The tables by name, in Markdown; those that there are rows for."""
    losses = figures.measured(results)
    found = {"conversions": _conversions(losses)}
    if figures.shares(losses):
        found["control"] = _retrained(losses, other=control)
        found["original"] = _retrained(losses, other=original)
        found["pairs"] = _pairs(losses)
    if len(figures.rates(losses)) > 1:
        found["rates"] = _rates(losses)
    return found


def _conversions(losses: dict[Row, float]) -> str:
    lines = []
    for layers in Layers:
        for start in Start:
            these = [row for row in losses if figures.seedless(row) == figures.seedless(Row(0, layers, start))]
            if not these:
                continue
            cost, back = over(losses, these[0]), "-"
            if start is Start.REFITTED and (plain := over(losses, Row(0, layers))):
                back = f"{1 - cost.mean / plain.mean:.0%}"
            loss = Spread(tuple(losses[row] for row in these)).as_text()
            about = ["", "-"] if layers is Layers.NONE else [start.value, cost.as_text("{:+.3f}")]
            lines.append([layers.value, about[0], str(len(these)), loss, about[1], back])
    return table("converted |  | seeds | loss | over the original | given back", lines)


def _retrained(losses: dict[Row, float], *, other) -> str:
    """Over `other`, by the share of pretraining's tokens; without retraining in the column 0 %."""
    shares, lines = figures.shares(losses), []
    for layers, start, recipe in figures.kinds(losses):
        if layers is Layers.NONE and other is control:
            continue
        rows = [Row(0, layers, start), *(Row(0, layers, start, recipe, share) for share in shares)]
        found = [over(losses, row, other=other) for row in rows]
        seeds = {len(one.values) for one in found if one}
        about = [layers.value, "" if layers is Layers.NONE else start.value, recipe.value]
        lines.append([*about, "-".join(map(str, sorted({min(seeds), max(seeds)}))), *_cells(found)])
    head = ["converted", "", "retrained on", "seeds", *(f"{share:g} %" for share in (0, *shares))]
    return table(" | ".join(head), lines)


def _pairs(losses: dict[Row, float]) -> str:
    """Over the control: the plain start less the refitted one, and other recipes less the original's predictions."""
    shares, pairs, lines = figures.shares(losses), {}, []
    for layers in (Layers.LAST, Layers.CHOSEN, Layers.ALL):
        of = lambda start, recipe, layers=layers: Row(0, layers, start, recipe)
        for recipe in (Recipe.TEXT, Recipe.TEACHER, Recipe.BOTH):
            words = layers.value, "plain less refitted", recipe.value
            pairs[words] = of(Start.PLAIN, recipe), of(Start.REFITTED, recipe)
        for recipe in (Recipe.TEXT, Recipe.BOTH):
            for start in Start:
                words = layers.value, f"{recipe.value} less predictions", f"{start.value} start"
                pairs[words] = of(start, recipe), of(start, Recipe.TEACHER)
    for words, pair in pairs.items():
        at = [[dataclasses.replace(row, share=share) for row in pair] for share in shares]
        if any(found := [figures.between(losses, *both) for both in at]):
            lines.append([*words, *_cells(found)])
    return table(" | ".join(["converted", "difference", "with", *(f"{share:g} %" for share in shares)]), lines)


def _rates(losses: dict[Row, float]) -> str:
    """Over the original of the first seed, of the rows that were measured with several rates."""
    rates, lines = figures.rates(losses), []
    others = [row for row in losses if row.recipe is not Recipe.NONE and row.rate != plan.RATE]
    kinds = dict.fromkeys((row.layers, row.start, row.recipe, row.share) for row in others)
    for layers, start, recipe, share in kinds:
        rows = [Row(0, layers, start, recipe, share, rate) for rate in rates]
        cells = [f"{losses[row] - losses[original(row)]:+.3f}" if row in losses else "-" for row in rows]
        about = [layers.value, "" if layers is Layers.NONE else start.value, recipe.value]
        lines.append([*about, f"{share:g} %", *cells])
    head = ["converted", "", "retrained on", "tokens", *(f"{rate:.2g} of the peak" for rate in rates)]
    return table(" | ".join(head), lines)


def _cells(spreads: list[Spread | None]) -> list[str]:
    """A row's; a mean that cannot be compared with the others', as it is of fewer seeds, says so."""
    most = max(len(one.values) for one in spreads if one)
    text = lambda one: one.as_text("{:+.3f}") + (f" (of {len(one.values)})" if len(one.values) < most else "")
    return ["-" if one is None else text(one) for one in spreads]
