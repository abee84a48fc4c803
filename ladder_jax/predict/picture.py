"""Plot each topology's compute and exposed communication."""

from ladder_jax import files
from ladder_jax.predict.result import Result
from ladder_jax.terminal import number

COMPUTE = "#4c78a8"
EXPOSED = "#e45756"


def plot(answer: Result, *, file: str) -> None:
    """One bar per topology, for a decode step and for the prefill: compute, and exposed
    communication.
    """
    request = answer.request
    rows = answer.rows
    figure, axes = files.pyplot().subplots(
        1, 2, figsize=(11, 1.7 + 0.38 * len(rows)), sharey=True, layout="constrained"
    )
    for axis, (panel, name) in zip(axes, (("decode step", "step"), ("prefill", "prefill"))):
        passes = [getattr(row.speed, name) for row in rows]
        exposed = [one.exposed * 1e3 for one in passes]
        compute = [one.seconds * 1e3 - wait for one, wait in zip(passes, exposed)]
        heights = range(len(rows))
        axis.barh(heights, compute, color=COMPUTE, height=0.68, label="compute")
        axis.barh(
            heights,
            exposed,
            left=compute,
            color=EXPOSED,
            height=0.68,
            label="exposed communication",
        )
        standard = next(
            (one.seconds for row, one in zip(rows, passes) if row.residual == "standard"), None
        )
        for height, one in enumerate(passes):
            ratio = f"   {standard / one.seconds:.2f} x" if standard else ""
            label = f" {number(one.seconds * 1e3)}{ratio}"
            axis.annotate(label, (one.seconds * 1e3, height), va="center", fontsize=8.5)
        axis.set_yticks(heights, [row.residual for row in rows])
        axis.set_xlim(0, 1.22 * max(one.seconds for one in passes) * 1e3)
        axis.set_xlabel("ms; x: the time of Standard, drawn here, over it" if standard else "ms")
        axis.set_title(panel, fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    title = (
        f"{request.model}, tensor {request.tensor}, batch {request.batch} on {request.machine.name}"
    )
    figure.suptitle(f"{title}: predicted (analytic)", fontsize=11, x=0.01, ha="left")
    handles_and_labels = axes[0].get_legend_handles_labels()
    figure.legend(
        *handles_and_labels, fontsize=8.5, frameon=False, loc="outside upper right", ncols=2
    )
    files.write_picture(file, figure)
