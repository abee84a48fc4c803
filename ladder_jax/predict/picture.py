"""Plots: each topology's compute and exposed communication; of a sweep, the Pareto front and a map of advice."""

import itertools
from collections.abc import Sequence

from ladder_jax import files, pyplot
from ladder_jax.predict import sweep as sweeps
from ladder_jax.predict.result import WORTH, Result, number
from ladder_jax.predict.sweep import Point

COMPUTE = "#4c78a8"
EXPOSED = "#e45756"
COLOURS = {
    "standard": "#b8b8b8",
    "ladder": "#4c78a8",
    "ladder-fresh": "#9ecae9",
    "ladder-2": "#2d4f73",
    "parallel": "#f2a35e",
    "parallel-shared-norm": "#f6cf8e",
    "parallel-ladder": "#54a24b",
    "desync-2": "#b279a2",
    "no-communication": "#dddddd",
}


def colour(residual: str, names: Sequence[str]) -> str:
    return COLOURS.get(residual) or f"C{list(names).index(residual) % 10}"


def plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed communication."""
    request = answer.request
    rows = answer.rows
    figure, axes = pyplot.load().subplots(1, 2, figsize=(11, 1.7 + 0.38 * len(rows)), sharey=True, layout="constrained")
    for axis, (panel, name) in zip(axes, (("decode step", "step"), ("prefill", "prefill"))):
        passes = [getattr(row.speed, name) for row in rows]
        exposed = [one.exposed * 1e3 for one in passes]
        compute = [one.seconds * 1e3 - wait for one, wait in zip(passes, exposed)]
        heights = range(len(rows))
        axis.barh(heights, compute, color=COMPUTE, height=0.68, label="compute")
        axis.barh(heights, exposed, left=compute, color=EXPOSED, height=0.68, label="exposed communication")
        standard = next((one.seconds for row, one in zip(rows, passes) if row.residual == "standard"), None)
        for height, one in enumerate(passes):
            ratio = f"   {standard / one.seconds:.2f} x" if standard else ""
            label = f" {number(one.seconds * 1e3)}{ratio}"
            axis.annotate(label, (one.seconds * 1e3, height), va="center", fontsize=8.5)
        axis.set_yticks(heights, [row.residual for row in rows])
        axis.set_xlim(0, 1.22 * max(one.seconds for one in passes) * 1e3)
        axis.set_xlabel("ms, and the speed over the fastest Standard" if standard else "ms")
        axis.set_title(panel, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    title = f"{request.model}, tensor {request.tensor}, batch {request.batch} on {request.machine.name}"
    figure.suptitle(f"{title}: predicted ({answer.fidelity})", fontsize=11, x=0.01, ha="left")
    handles_and_labels = axes[0].get_legend_handles_labels()
    figure.legend(*handles_and_labels, fontsize=8.5, frameon=False, loc="outside upper right", ncols=2)
    _save(figure, file)


def plot_sweep(points: Sequence[Point], *, file: str) -> None:
    """Left: latency and throughput of every topology, with the Pareto front. Right: a map for each tensor size."""
    sizes = sorted({point.tensor for point in points})
    figure = pyplot.load().figure(figsize=(7.2 + 2.7 * len(sizes), 5.2), layout="constrained")
    axes = figure.subplots(1, 1 + len(sizes), width_ratios=[2.6, *([1.0] * len(sizes))])
    request = points[0].result.request
    _front(axes[0], points)
    for axis, tensor in zip(axes[1:], sizes):
        _map(axis, [point for point in points if point.tensor == tensor], first=tensor == sizes[0])
        axis.set_title(f"tensor {tensor}", fontsize=10)
    labelled = itertools.chain.from_iterable(zip(*axis.get_legend_handles_labels()) for axis in axes)
    handles = {label: handle for handle, label in labelled}
    names = [name for name in request.residuals if name in handles]
    caption = "cells: recommended topology, and its tokens/s over the fastest Standard's"
    where = dict(loc="outside lower right", ncols=5, fontsize=8.5, frameon=False, title=caption)
    figure.legend([handles[name] for name in names], names, **where)
    shape = f"prompt {request.prompt_length}, {request.new_tokens} new tokens"
    figure.suptitle(f"{request.model} on {request.machine.name}, predicted: {shape}", fontsize=11, x=0.01, ha="left")
    _save(figure, file)


def _front(axis, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    names = points[0].result.request.residuals
    best = sweeps.front(points)
    place = lambda point, row: (sweeps.latency(row) * 1e3, sweeps.throughput(point, row))
    for point, row in sweeps.communicating(points):
        fill = colour(row.residual, names)
        axis.plot(*place(point, row), "o", color=fill, ms=5, alpha=0.45, mew=0, label=row.residual)
    axis.plot(*zip(*(place(*one) for one in best)), color="#333333", lw=1.1, zorder=3)
    for point, row in best:
        axis.plot(*place(point, row), "o", color=colour(row.residual, names), ms=9, mec="#333333", zorder=4)
        label = f"TP {point.tensor}, batch {point.batch}"
        offset = dict(xytext=(-7, 6), textcoords="offset points")
        axis.annotate(label, place(point, row), **offset, fontsize=7.5, ha="right")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(x=0.2, y=0.1)
    for one in (axis.xaxis, axis.yaxis):  # labels 1, 2, 5, 10, ... instead of powers of ten
        one.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.set_minor_locator(NullLocator())
        one.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_xlabel("ms per token of each user (decode)")
    axis.set_ylabel("tokens per second and device")
    axis.set_title("Pareto front: up and to the left is better", fontsize=10, loc="left")
    axis.grid(True, lw=0.4, color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)


def _map(axis, points: Sequence[Point], *, first: bool) -> None:
    """Columns are batches, rows are link speeds; a cell has the recommended topology and its speed-up."""
    batches, links = (sorted({getattr(point, name) for point in points}) for name in ("batch", "link"))
    names = points[0].result.request.residuals
    for point in points:
        x = batches.index(point.batch)
        y = links.index(point.link)
        row = point.chosen
        text = "too\nlarge"
        if point.fits:
            axis.bar(x, 1, 1, y - 0.5, color=colour(row.residual, names), ec="w", lw=2, label=row.residual)
            text = f"{row.speedup:.2f}" if row.speedup >= WORTH else "-"
        axis.text(x, y, text, ha="center", va="center", fontsize=9)
    axis.set_xlim(-0.5, len(batches) - 0.5)
    axis.set_ylim(-0.5, len(links) - 0.5)
    axis.set_xticks(range(len(batches)), batches)
    axis.set_yticks(range(len(links)), [f"{link:g} x" for link in links] if first else [""] * len(links))
    axis.set_xlabel("batch")
    axis.set_ylabel("speed of the link" if first else "")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)


def _save(figure, file: str) -> None:
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    pyplot.load().close(figure)
