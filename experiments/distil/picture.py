"""The figure: loss over the control against the share of pretraining's tokens, plain and refitted."""

import math
import statistics

from experiments.distil import figures
from experiments.distil.plan import Layers, Recipe, Row, Start
from ladder_jax import files, pyplot

COLOURS = {Start.PLAIN: "#e45756", Start.REFITTED: "#4c78a8"}
DASHES = {Recipe.TEACHER: "-", Recipe.BOTH: "--", Recipe.TEXT: ":"}
MARKERS = {Recipe.TEACHER: "o", Recipe.BOTH: "s", Recipe.TEXT: "^"}


def plot(results: dict, *, file: str) -> None:
    """A panel for each choice of layers. Lines: means over the seeds; bands: from the least seed to the greatest.

    Shares that fewer seeds have are open marks; those of one seed of several stand apart, as crosses.
    """
    plt, losses = pyplot.load(), figures.measured(results)
    shares, kinds = figures.shares(losses), figures.kinds(losses)
    panels = [layers for layers in Layers if any(layers is kind[0] for kind in kinds) and layers is not Layers.NONE]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4), layout="constrained", squeeze=False)
    nothing, shown = shares[0] / 2, set()  # where no retraining stands on an axis without a zero
    for axis, layers in zip(axes[0], panels):
        for _, start, recipe in (kind for kind in kinds if kind[0] is layers):
            rows = [Row(0, layers, start), *(Row(0, layers, start, recipe, share) for share in shares)]
            points = [(x, over) for x, row in zip((nothing, *shares), rows) if (over := figures.over(losses, row))]
            most = max(len(over.values) for _, over in points)
            shown.update(x for x, _ in points[1:])
            single = [(x, over.mean) for x, over in points if len(over.values) < min(2, most)]
            axis.plot(*(zip(*single) if single else ([], [])), "x", ms=5, color=COLOURS[start])
            points = [(x, over) for x, over in points if len(over.values) >= min(2, most)]
            style = dict(color=COLOURS[start], ls=DASHES[recipe], label=f"{start.value}, {recipe.value}")
            places, of = (nothing, *shares), dict(points)
            at = lambda pick: [pick(of[x].values) if x in of else math.nan for x in places]  # a line breaks at a NaN
            axis.plot(places, at(statistics.fmean), marker=MARKERS[recipe], ms=3.5, lw=1.6, **style)
            fewer = [(x, spread.mean) for x, spread in points if len(spread.values) < most]
            axis.plot(*(zip(*fewer) if fewer else ([], [])), MARKERS[recipe], ms=4.5, mfc="white", color=COLOURS[start])
            axis.fill_between(places, at(min), at(max), color=COLOURS[start], alpha=0.12, lw=0)
        axis.set_xscale("log")
        axis.set_xticks([nothing, *sorted(shown)], ["0", *(f"{share:g} %" for share in sorted(shown))])
        axis.minorticks_off()
        axis.axhline(0, color="#999999", lw=0.8)
        axis.set_title(layers.value, fontsize=10, loc="left")
        axis.set_xlabel("tokens of retraining, of those of pretraining")
        axis.grid(lw=0.4, color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("nats a byte over the original, retrained likewise")
    axes[0][0].legend(frameon=False, fontsize=8, handlelength=3)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=130))
    plt.close(figure)
