"""Plot tokens per second above and the share of the copy's bandwidth below, with one column per
batch.
"""

from ladder_jax import files
from ladder_jax.bench.result import Result
from ladder_jax.terminal import number

PANELS = (
    ("tokens_per_second", "tokens/s", 1),
    ("bandwidth_share", "% of the copy's bandwidth", 100),
)


def plot(answer: Result, *, file: str) -> None:
    """Bars are medians, error bars the range over the repeats. The file's ending sets the
    format.
    """
    plt = files.pyplot()
    names, batches = [one.name for one in answer.request.variants], answer.request.batches
    size = (1.6 + len(batches) * max(1.8, 0.8 * len(names)), 6)
    # Batches differ in tokens/s by far more than residuals do, so each has its own axis; all shares
    # use one axis.
    figure, axes = plt.subplots(
        2, len(batches), figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for column, batch in enumerate(batches):
        rows = [row for row in answer.rows if row["batch"] == batch]
        for axis, (key, label, scale) in zip(axes[:, column], PANELS):
            heights = [row[key] * scale for row in rows]
            below = [height - row[f"{key}_min"] * scale for height, row in zip(heights, rows)]
            above = [row[f"{key}_max"] * scale - height for height, row in zip(heights, rows)]
            colours = [f"C{index}" for index in range(len(names))]
            # rounding may make them negative
            clip = lambda lengths: [max(0.0, length) for length in lengths]
            bars = axis.bar(
                names, heights, yerr=(clip(below), clip(above)), color=colours, capsize=4, width=0.7
            )
            axis.bar_label(bars, [number(height) for height in heights], fontsize=8, padding=2)
            axis.margins(y=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_ylabel(label if column == 0 else "")
        axes[0, column].set_title(f"batch {batch}", fontsize=10)
        axes[1, column].sharey(axes[1, 0])
        if len(names) > 2:
            axes[1, column].set_xticks(range(len(names)), names, rotation=30, ha="right")
    request = answer.request
    figure.suptitle(
        f"{answer.title}: prompt {request.prompt_length}, {request.new_tokens} new tokens",
        fontsize=10,
    )
    files.write_picture(file, figure)
