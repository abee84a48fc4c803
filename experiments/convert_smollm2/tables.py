"""The README's tables and the figures, from results.json."""

import json
import pathlib

from experiments.convert_smollm2 import figures
from experiments.convert_smollm2.figures import loss, runs, spread
from experiments.pretrain.tables import fill, table
from ladder_jax import files
from ladder_jax.errors import UserError


def write(folder: pathlib.Path) -> None:
    """README.md's tables (if it is there), quality.png and sensitivity.png beside `folder`/results.json; prints them.

    Raises UserError where there are no results.
    """
    from experiments.convert_smollm2 import picture

    file = folder / "results.json"
    if not file.is_file():
        raise UserError(f"there is no {str(file)!r}: run the study first, without --tables")
    results = json.loads(file.read_text())
    found = sections(results)
    print("\n\n".join(f"{name}\n\n{text}" for name, text in found.items()))
    readme = folder / "README.md"
    if readme.is_file():
        text = fill(readme.read_text(), found)
        files.write_atomically(str(readme), lambda path: pathlib.Path(path).write_text(text))
    picture.quality(results, file=str(folder / "quality.png"))
    picture.sensitivity(results, file=str(folder / "sensitivity.png"))


def sections(results: dict) -> dict[str, str]:
    """The README's tables by name, in Markdown; those that there are runs for."""
    found = {"converted": _converted(results), "retrained": _retrained(results), "choices": _choices(results)}
    return {name: text for name, text in found.items() if text}


def _converted(results: dict) -> str:
    rows, original = [], runs(results, "original")
    for name in figures.names(results, retrained=False):
        (run,) = runs(results, name)
        share = f"{run['converted'] / results['num_layers']:.0%}"
        cost = figures.less([run], lambda run: original[0] if original else None)
        rows.append(
            [
                figures.title(run, of=results["num_layers"]),
                share,
                f"{loss(run):.3f}",
                cost,
                _perplexity([run]),
                *_answers([run]),
            ]
        )
    head = ["layers converted", "share", "loss", "over the original", "perplexity", *_heads(results)]
    return table(" | ".join(head), rows) if rows else ""


def _retrained(results: dict) -> str:
    rows, original = [], runs(results, "original")
    for name in figures.names(results, retrained=True):
        these = runs(results, name)
        first = these[0]
        begun = figures.before(results, first)
        cells = [figures.title(first, of=results["num_layers"]), figures.WORDS[first["way"]], str(len(these))]
        cells += [f"{loss(begun):.3f}" if begun else "-", spread([loss(run) for run in these])]
        cells.append(figures.less(these, lambda run: figures.control(results, run)))
        cells.append(figures.less(these, lambda run: original[0] if original else None))
        minutes = spread([run["seconds"] / 60 for run in these], "{:.1f}")
        rows.append([*cells, *_answers(these), minutes])
    head = "layers converted | retrained on | seeds | loss before | after | over the control | over the original"
    return table(" | ".join([head, *_heads(results), "minutes"]), rows) if rows else ""


def _choices(results: dict) -> str:
    curve = results["sensitivity"]
    rows = []
    for name in ("last", "ranked", "greedy"):
        if name in curve:
            layers = ", ".join(map(str, curve[name]["layers"]))
            rows.append([name, str(len(curve[name]["layers"])), layers, f"{curve[name]['cost']:+.3f}"])
    return table("choice | layers | which | cost together", rows)


def _perplexity(these: list[dict]) -> str:
    return spread([run["perplexity"]["perplexity"] for run in these], "{:.1f}")


def _heads(results: dict) -> list[str]:
    worked = ["worked answers"] if any("worked" in run for run in results["runs"]) else []
    return ["continuation", "normalised", *worked]


def _answers(these: list[dict]) -> list[str]:
    mean = lambda task, key: f"{sum(run[task][key] for run in these) / len(these):.0%}"
    found = [mean("continuation", key) for key in ("accuracy", "accuracy_normalised")]
    return [*found, mean("worked", "accuracy_normalised")] if all("worked" in run for run in these) else found
