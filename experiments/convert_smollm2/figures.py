"""What the arms' scores say, as numbers: the same arm over its seeds, and what it costs over others."""

import statistics
from collections.abc import Callable

Run = dict
WORDS = {"tokens": "text", "teacher": "original's predictions", "gradual": "text, layer groups in turn"}


def runs(results: dict, name: str) -> list[Run]:
    """An arm's, by seed; none where it was not measured."""
    return sorted((run for run in results["runs"] if run["arm"] == name), key=lambda run: run["seed"])


def names(results: dict, *, retrained: bool) -> list[str]:
    """The arms that were measured, in the plan's order."""
    return list(dict.fromkeys(run["arm"] for run in results["runs"] if (run["way"] != "none") is retrained))


def loss(run: Run) -> float:
    return run["perplexity"]["loss"]


def before(results: dict, run: Run) -> Run | None:
    """The same layers converted to the same kind, not retrained."""
    alike = ("residual", "ladder_layers")
    found = [one for one in results["runs"] if one["way"] == "none" and all(one[key] == run[key] for key in alike)]
    return found[0] if found else None


def control(results: dict, run: Run) -> Run | None:
    """The original, retrained on the text with the same seed."""
    found = [one for one in runs(results, "original-tokens") if one["seed"] == run["seed"]]
    return found[0] if found else None


def title(run: Run, *, of: int) -> str:
    """Which of the model's `of` layers are converted: "last 15", "15 least sensitive", "all 30"."""
    if run["how"] is None:
        return "original"
    count = run["converted"]
    layers = f"{count} least sensitive" if run["how"] == "sensitive" else f"last {count}" if count < of else f"all {of}"
    return layers if run["residual"] == "ladder" else f"{layers}, {run['residual']}"


def spread(values: list[float], form: str = "{:.3f}") -> str:
    """The mean, and with several seeds the sample's standard deviation."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.3f}"


def less(these: list[Run], other: Callable[[Run], Run | None]) -> str:
    """Their losses less those of each one's `other`; a dash where there is none."""
    pairs = [(run, other(run)) for run in these]
    differences = [loss(run) - loss(one) for run, one in pairs if one is not None]
    return spread(differences, "{:+.3f}") if differences else "-"
