"""Print the sensitivity curve, and the cost of each choice of layers, as tables."""

from ladder_jax import terminal
from ladder_jax.pretrained.sensitivity.result import Result
from ladder_jax.terminal import Table

BAR = 40  # characters of the longest bar
NAMES = {"last": "the last", "ranked": "least sensitive", "greedy": "greedily"}


def show(result: Result) -> None:
    """Print `result` on standard output."""
    head = f"the standard model's loss is {result.loss:.4f} nats a token"
    measured = f"of {result.tokens:,} tokens in sequences of {result.sequence:,}; one {result.residual} layer costs"
    costs = [loss - result.loss for loss in result.alone]
    longest = max(*costs, 1e-9)
    bar = lambda cost: "#" * round(BAR * max(cost, 0) / longest)
    curve = Table(("layer", "nats", ""), [(str(n), f"{cost:+.4f}", bar(cost)) for n, cost in enumerate(costs)], ("",))
    rows = []
    for name, subset in result.subsets.items():
        mark = " (taken)" if name == result.chosen else ""
        layers = ", ".join(map(str, sorted(subset.layers)))
        rows.append((NAMES[name] + mark, layers, f"{subset.loss - result.loss:+.4f}"))
    choices = Table(("chosen", "layers", "nats"), rows, ("chosen", "layers"))
    terminal.show([head, measured, curve, choices])
