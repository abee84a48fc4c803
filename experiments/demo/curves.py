"""Loss curves of several runs: a table for the terminal, and a picture."""

import pathlib
from collections.abc import Mapping

from rich.table import Table

from ladder_jax import pyplot
from ladder_jax.train import metrics


def table(runs: Mapping[str, pathlib.Path], *, baseline: float | None = None, rows: int = 10) -> Table:
    """About `rows` evenly spaced steps of each run's training loss; `baseline` is named in the title."""
    caption = None if baseline is None else f"bigram entropy of the text: {baseline:.3f}"
    shown = Table("step", *runs, title="training loss, nats a byte", caption=caption, min_width=40)
    losses = {name: _losses(path) for name, path in runs.items()}
    steps = sorted(set.union(*(set(curve) for curve in losses.values())))
    every = max(1, len(steps) // rows)
    for step in steps[::-1][::every][::-1]:
        shown.add_row(str(step), *(f"{curve[step]:.3f}" if step in curve else "" for curve in losses.values()))
    return shown


def experts(runs: Mapping[str, pathlib.Path]) -> Table:
    """What the routers of each run chose in its last logged step."""
    columns = ("largest load over mean", "never chosen", "router entropy, nats")
    shown = Table("", *columns, title="experts, last step", min_width=40)
    for name, path in runs.items():
        last = metrics.read(path)[-1]
        load, dead, entropy = (last[field] for field in ("expert_load", "dead_experts", "router_entropy"))
        shown.add_row(name, f"{load:.2f}", f"{dead:.0f}", f"{entropy:.2f}")
    return shown


def plot(runs: Mapping[str, pathlib.Path], path: pathlib.Path, *, baseline: float | None = None) -> None:
    """The curves of `table` as a PNG (or whatever `path`'s ending says)."""
    plt = pyplot.load()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, folder in runs.items():
        curve = _losses(folder)
        axes.plot(list(curve), list(curve.values()), label=name)
    if baseline is not None:
        axes.axhline(baseline, color="grey", linestyle="--", linewidth=1, label="bigram entropy")
    axes.set(xlabel="step", ylabel="training loss (nats a byte)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _losses(folder: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics.read(folder) if row["loss"] is not None}
