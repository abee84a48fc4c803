"""Predicted against measured: the tables that the constants were fitted to, and everything else."""

from ladder_jax import files
from ladder_jax.predict.picture import COLOURS

NAMES = {"standard": "Standard", "ladder": "Ladder", "parallel": "Parallel", "no_communication": "no communication"}
INK = {**COLOURS, "standard": "#7f7f7f", "no_communication": "#54a24b"}


def plot(results: dict, *, file: str) -> None:
    """A panel a link and size: tokens/s over the batch, lines predicted, marks measured."""
    pyplot = _pyplot()
    panels: dict[tuple, list[dict]] = {}
    for row in results["published"]:
        panels.setdefault((row["link"], row["tensor"]), []).append(row)
    widths = [0.7 + 0.3 * len({r["batch"] for r in rows}) for rows in panels.values()]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 4.2), width_ratios=widths, layout="constrained")
    for axis, ((link, tensor), rows) in zip(axes, panels.items()):
        batches = sorted({row["batch"] for row in rows})
        base = {row["batch"]: row["measured"] for row in rows if row["residual"] == "standard"}
        for index, (residual, name) in enumerate(NAMES.items()):
            own = [row for row in rows if row["residual"] == residual]
            places = [batches.index(row["batch"]) + 0.06 * (index - 1.5) for row in own]
            scale = [base[row["batch"]] for row in own]
            colour = INK[residual]
            axis.plot(places, [r["predicted"] / s for r, s in zip(own, scale)], "-", color=colour, lw=1.8, alpha=0.8)
            axis.plot(places, [r["measured"] / s for r, s in zip(own, scale)], "o", color=colour, ms=6, label=name)
        axis.set_xticks(range(len(batches)), batches)
        axis.set_xlim(-0.4, len(batches) - 0.6)
        axis.set_xlabel("batch")
        axis.set_title(f"TP {tensor}, {'NVLink' if link == 'nvlink' else 'no NVLink'}", fontsize=10)
        axis.grid(axis="y", lw=0.4, color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens/s over the measured Standard")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    one = results["published_summary"]
    title = "Llama-3-70B on H100s: marks measured (arXiv 2501.06589), lines predicted by nine constants"
    figure.suptitle(
        f"{title}; median error {one['median_error']:.1%}, worst {one['worst_error']:.1%}",
        fontsize=11,
        x=0.01,
        ha="left",
    )
    _save(figure, file)


def plot_elsewhere(results: dict, *, file: str) -> None:
    """Left: errors of what was fitted to and of what was not. Right: Ladder's speed-up by the size of the model."""
    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), width_ratios=(1.6, 1), layout="constrained")
    groups = {"fitted: 70B tables": results["published"]}
    labels = {"logs": "8B, NVLink", "plots": "70B, no NVLink,\nTP 2 and 4", "blog": "1B and 3B"}
    for source, name in labels.items():
        groups[name] = [row for row in results["elsewhere"] if row["source"] == source]
    for place, rows in enumerate(groups.values()):
        for index, row in enumerate(rows):
            error = 100 * (row["predicted"] / row["measured"] - 1)
            spread = 0.32 * (2 * (index + 0.5) / len(rows) - 1)
            left.plot(place + spread, error, "o", color=INK[row["residual"]], ms=5, alpha=0.9, mew=0)
    left.axhline(0, color="#333333", lw=0.8)
    left.axhspan(-5, 5, color="#f2f2f2", zorder=0)
    left.set_xticks(range(len(groups)), groups)
    left.set_ylabel("predicted less measured, %")
    left.set_title("errors of tokens/s; only the first group was fitted to", fontsize=10, loc="left")
    left.legend(
        handles=[pyplot.Line2D([], [], marker="o", ls="", color=INK[key], label=name) for key, name in NAMES.items()],
        fontsize=8.5, frameon=False, ncols=2, loc="upper right",
    )  # fmt: skip
    _sizes(right, results)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, file)


def _sizes(axis, results: dict) -> None:
    rows = results["elsewhere"] + results["published"]
    at = {(r["model"], r["residual"]): r["measured"] for r in rows
          if (r["link"], r["tensor"], r["batch"]) == ("nvlink", 8, 4)}  # fmt: skip
    names = [one["model"] for one in results["sizes"]]
    for residual in ("ladder", "parallel", "no_communication"):
        predicted = [one["speedup"][residual] for one in results["sizes"]]
        axis.plot(range(len(names)), predicted, "-", color=INK[residual], lw=1.8, alpha=0.8)
        for place, name in enumerate(names):
            if (name, residual) in at:
                axis.plot(place, at[name, residual] / at[name, "standard"], "o", color=INK[residual], ms=6)
    axis.set_xticks(range(len(names)), [name.split("-")[-1].upper() for name in names])
    axis.set_ylabel("tokens/s over Standard")
    axis.set_title("by size: TP 8, NVLink, batch 4", fontsize=10, loc="left")
    axis.grid(axis="y", lw=0.4, color="#e6e6e6")


def _pyplot():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure, file: str) -> None:
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    _pyplot().close(figure)
