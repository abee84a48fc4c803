"""Print the sensitivity curve, and the cost of each choice of layers, as tables."""

from ladder_jax import terminal
from ladder_jax.pretrained.sensitivity.result import Result

BAR = 40  # characters of the longest bar
NAMES = {"last": "the last", "ranked": "least sensitive", "greedy": "greedily"}


def show(result: Result) -> None:
    """Print `result` on standard output."""
    from rich.table import Table

    head = (
        f"{result.tokens:,} tokens in sequences of {result.sequence:,}: the standard model's loss is"
        f" {result.loss:.4f} nats a token; one {result.residual} layer costs"
    )
    curve = Table("layer", "nats", "", box=None, pad_edge=False)
    costs = [loss - result.loss for loss in result.alone]
    longest = max(*costs, 1e-9)
    for layer, cost in enumerate(costs):
        curve.add_row(str(layer), f"{cost:+.4f}", "#" * round(BAR * max(cost, 0) / longest))
    choices = Table("chosen", "layers", "nats", box=None, pad_edge=False)
    for name, subset in result.subsets.items():
        mark = " (taken)" if name == result.chosen else ""
        layers = ",".join(map(str, sorted(subset.layers)))
        choices.add_row(NAMES[name] + mark, layers, f"{subset.loss - result.loss:+.4f}")
    terminal.show([head, curve, choices])
