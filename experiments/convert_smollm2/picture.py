"""The study's figures: the loss over the share of layers converted, over retraining tokens, and the sensitivity."""

import statistics

from experiments.convert_smollm2 import figures
from experiments.convert_smollm2.figures import loss, runs
from experiments.pretrain.picture import finish, load_pyplot
from ladder_jax.pretrained.sensitivity import Result, Subset, picture

INK = {"last": "#4c78a8", "sensitive": "#f58518", "original": "#4d4d4d"}
MARKS = {"ladder": "o", "ladder-fresh": "^", "ladder-2": "s"}
DASHES = {"tokens": "-", "teacher": "--", "gradual": ":"}


def quality(results: dict, *, file: str) -> None:
    """Left: means over the seeds, hollow marks not retrained, filled ones retrained. Right: means, and the range."""
    figure, (shares, tokens) = load_pyplot().subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    _shares(shares, results)
    _tokens(tokens, results)
    for axis in (shares, tokens):
        axis.set_ylabel("held-out loss, nats a token")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, frameon=False)
    finish(figure, f"{results['text']}: {results['held_out_tokens']:,} held-out tokens", file)


def sensitivity(results: dict, *, file: str) -> None:
    """As `ladder-jax convert --ladder-layers auto:N` draws it."""
    found = results["sensitivity"]
    subset = lambda name: Subset(tuple(found[name]["order"]), found[name]["loss"]) if name in found else None
    about = {name: found[name] for name in ("residual", "ranks", "tokens", "sequence", "loss")}
    alone = tuple(row["loss"] for row in found["curve"])
    choices = {name: subset(name) for name in ("last", "ranked", "greedy")}
    picture.plot(Result(**about, alone=alone, **choices), file=file)


def _shares(axis, results: dict) -> None:
    layers = results["num_layers"]
    original = runs(results, "original")
    for how in ("last", "sensitive"):
        places = {0: loss(original[0])} if original else {}
        for run in results["runs"]:
            whole = run["converted"] == layers
            if run["way"] == "none" and run["residual"] == "ladder" and (run["how"] == how or whole):
                places[run["converted"]] = loss(run)
        if len(places) > 1:
            line = sorted((100 * count / layers, value) for count, value in places.items())
            words = {"last": "the last layers", "sensitive": "the least sensitive"}[how]
            axis.plot(*zip(*line), "o-", mfc="white", color=INK[how], lw=1.4, label=f"{words}, not retrained")
    for kind in ("ladder-fresh", "ladder-2"):
        points = [run for run in results["runs"] if run["way"] == "none" and run["residual"] == kind]
        if points:
            axis.plot([100 * run["converted"] / layers for run in points], list(map(loss, points)), MARKS[kind],
                      mfc="white", color=INK["last"], label=f"the last layers, {kind}, not retrained")  # fmt: skip
    labelled = set()
    for name in figures.names(results, retrained=True):
        these = runs(results, name)
        first = these[0]
        if first["way"] != "tokens":
            continue
        ink = INK[first["how"] or "original"]
        label = "the original and these, retrained on the text (filled)" if not labelled else None
        labelled.add(name)
        place, mean = 100 * first["converted"] / layers, statistics.fmean(map(loss, these))
        axis.plot(place, mean, MARKS.get(first["residual"], "D"), color=ink, label=label)
    axis.set_xlabel("share of layers converted, %")


def _tokens(axis, results: dict) -> None:
    each = results["tokens_a_step"] / 1e3
    for name in figures.names(results, retrained=True):
        these = runs(results, name)
        first, begun = these[0], figures.before(results, these[0])
        start = [[0, loss(begun)]] if begun else []
        curves = [[*start, *run["held_out"]] for run in these]
        steps = [step * each for step, _ in curves[0]]
        by_step = list(zip(*([value for _, value in curve] for curve in curves)))
        ink, label = (
            INK[first["how"] or "original"],
            f"{figures.title(first, of=results['num_layers'])}: {figures.WORDS[first['way']]}",
        )
        axis.plot(steps, list(map(statistics.fmean, by_step)), DASHES[first["way"]], color=ink, lw=1.6, label=label,
                  marker=MARKS.get(first["residual"], "D"), ms=3.5)  # fmt: skip
        axis.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=ink, alpha=0.18, lw=0)
    axis.set_xlabel("thousand tokens of retraining")
