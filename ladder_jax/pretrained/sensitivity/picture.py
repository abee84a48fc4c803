"""Plot the sensitivity curve: the cost of each layer converted alone, and the chosen layers."""

from ladder_jax import files, pyplot
from ladder_jax.pretrained.sensitivity.result import Result
from ladder_jax.pretrained.sensitivity.text import NAMES

CHOSEN, OTHERS = "#4c78a8", "#bab0ac"


def plot(result: Result, *, file: str) -> None:
    """Write the plot to `file`. The scale is logarithmic: a few layers cost a hundred times as much as the others."""
    plt = pyplot.load()
    costs = [loss - result.loss for loss in result.alone]
    shown = [max(cost, 1e-4) for cost in costs]  # below this it is noise, or a gain
    chosen = result.subsets[result.chosen].layers
    colours = [CHOSEN if layer in chosen else OTHERS for layer in range(len(costs))]
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.bar(range(len(costs)), shown, color=colours)
    axes.set(yscale="log", xlabel="layer, converted alone", ylabel="cost in nats a token")
    choices = [f"{NAMES[name]} {len(s.layers)}: {s.loss - result.loss:+.3f}" for name, s in result.subsets.items()]
    axes.set_title(f"{result.residual} layers without retraining; together, {', '.join(choices)} (blue)", fontsize=10)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    plt.close(figure)
