"""The sensitivity curve as a plot: what each layer costs alone, and which were chosen."""

from ladder_jax import files, pyplot
from ladder_jax.pretrained.sensitivity.result import Result
from ladder_jax.pretrained.sensitivity.text import NAMES

TAKEN, LEFT = "#4c78a8", "#bab0ac"


def plot(result: Result, *, file: str) -> None:
    """Logarithmic, as a few layers cost a hundred times what the others do."""
    plt = pyplot.load()
    costs = [loss - result.loss for loss in result.alone]
    shown = [max(cost, 1e-4) for cost in costs]  # below this it is noise, or a gain
    taken = result.subsets[result.chosen].layers
    colours = [TAKEN if layer in taken else LEFT for layer in range(len(costs))]
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axes.bar(range(len(costs)), shown, color=colours)
    axes.set(yscale="log", xlabel="layer, converted alone", ylabel="cost in nats a token")
    told = [f"{NAMES[name]} {len(s.layers)}: {s.loss - result.loss:+.3f}" for name, s in result.subsets.items()]
    axes.set_title(f"{result.residual} layers without retraining; together, {', '.join(told)} (blue)", fontsize=10)
    files.write_atomically(file, lambda path: figure.savefig(path, dpi=150))
    plt.close(figure)
