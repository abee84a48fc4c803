"""Which arrays read a sublayer's input, and which writes its output; and what a fit makes of them."""

import numpy as np

from ladder_jax.config import ModelConfig
from ladder_jax.pretrained.refit.least_squares import OutputStatistics, Statistics, folded
from ladder_jax.pretrained.source import Key, Source

SUBLAYERS = ("attention", "mlp")
"""The names of a layer's two sublayers, in their order."""
EXPERTS = {"router": 1, "experts/gate": 0, "experts/up": 0, "shared/gate": 1, "shared/up": 1, "shared/share": 0}
READERS = {"attention": {"query": 1, "key": 1, "value": 1}, "mlp": {"gate": 1, "up": 1, **EXPERTS}}
"""The arrays that may read a sublayer's input, and the dimension of each that tensor parallelism splits (where it
splits none, any)."""
WRITERS = {"attention": "out", "mlp": "down"}
"""The output projections; those of experts stay."""


def gain_key(layer: int, sublayer: str, *, model: ModelConfig) -> Key:
    return Key.of_layer(layer, f"{sublayer}_norm/scale", model=model)


def output_key(layer: int, sublayer: str, *, model: ModelConfig) -> Key:
    return Key.of_layer(layer, f"{sublayer}/{WRITERS[sublayer]}", model=model)


def readers(source: Source, layer: int, sublayer: str) -> dict[Key, int]:
    """The arrays of `source` that read the sublayer's input, each with the dimension that READERS has."""
    of = lambda name: Key.of_layer(layer, f"{sublayer}/{name}", model=source.model)
    keys = {of(name): axis for name, axis in READERS[sublayer].items()}
    return {key: axis for key, axis in keys.items() if key in source.arrays}


def refitted_arrays(
    source: Source, statistics: Statistics, *, layer: int, sublayer: str, ridge: float
) -> tuple[dict[Key, np.ndarray], list[np.ndarray]]:
    """A sublayer's fitted projections and its gain of ones, in the source's dtypes; and M, of each rank's input."""
    key_of_gain = gain_key(layer, sublayer, model=source.model)
    gain, solved = source.arrays[key_of_gain].read(), {}
    arrays = {key_of_gain: np.ones_like(gain)}
    for key, axis in readers(source, layer, sublayer).items():
        weight = source.arrays[key].read()
        # Where several ranks share a key/value head, they share its fit.
        parts = min(len(statistics.products), weight.shape[axis])
        if parts not in solved:
            solved[parts] = statistics.matrices(parts, ridge=ridge)
        if key.name.startswith("layers/mlp/experts/"):  # in float64 one at a time
            arrays[key] = np.stack([folded(expert, gain, solved[parts], axis=1) for expert in weight])
        else:
            arrays[key] = folded(weight, gain, solved[parts], axis=axis)
    return arrays, solved[max(solved)]


def refitted_output(weight: np.ndarray, statistics: OutputStatistics, *, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """An output projection, fitted, in its dtype; and the change [M, D] before it was rounded to that."""
    change = statistics.change(ridge=ridge)
    return (weight.astype(np.float64) + change.reshape(weight.shape)).astype(weight.dtype), change
