"""Predicted against measured: the tables that the constants were fitted to."""

from ladder_jax import files, pyplot
from ladder_jax.predict.picture import COLOURS

NAMES = {"standard": "Standard", "ladder": "Ladder", "parallel": "Parallel", "no_communication": "no communication"}
INK = {**COLOURS, "standard": "#7f7f7f", "no_communication": "#54a24b"}


def plot(results: dict, *, file: str) -> None:
    """A panel a link and size: tokens/s over the batch, lines predicted, marks measured."""
    plt = pyplot.load()
    panels: dict[tuple, list[dict]] = {}
    for row in results["published"]:
        panels.setdefault((row["link"], row["tensor"]), []).append(row)
    widths = [0.7 + 0.3 * len({r["batch"] for r in rows}) for rows in panels.values()]
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.2), width_ratios=widths, layout="constrained")
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
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    plt.close(figure)
