"""The forward pass on the calibration text, sublayer by sublayer, and the statistics of each sublayer."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from ladder_jax import nn, residual
from ladder_jax.nn.parameter import LAYERS, stack_of
from ladder_jax.pretrained.load import reader
from ladder_jax.pretrained.refit.least_squares import OutputStatistics, Statistics
from ladder_jax.pretrained.refit.programs import Programs, programs
from ladder_jax.pretrained.source import Key, Source, Stored

ROWS = 4  # rows per batch, at most


class Pass:
    """The forward pass of a model on the calibration text, sublayer by sublayer.

    source: the model's arrays, which `replace` replaces. batches: (tokens [B, T], weights [B]) of equal shape; the
    rows that fill the last one have the weight 0. streams: of each batch, on the host.
    """

    def __init__(self, definition: nn.ModelDef, source: Source, rows: np.ndarray):
        self.definition, self.original = definition, source
        self.source = dataclasses.replace(source, model=definition.config)
        self._programs, layout = programs(definition, LAYERS), definition.layout
        self._delays = np.array(residual.of_model(definition.config).delays, np.int32).reshape(-1, 2)
        self._params = {of_original: functools.lru_cache(maxsize=1)(self._layer) for of_original in (False, True)}
        self._place = lambda tree, dims: jax.tree.map(lambda a, d: jax.device_put(a, layout.sharding(d)), tree, dims)
        self.batches = list(_batches(rows, multiple=layout.batch_ranks))
        embedding = {"table": next(reader(self.source, definition)([Key("embedding/table")]))}
        self.streams = [
            jax.device_get(self._programs.begin(embedding, self._place(tokens, "BT"))) for tokens, _ in self.batches
        ]

    def converted(self, layer: int) -> bool:
        return bool(self._delays[layer].any())

    def late(self, layer: int, sublayer: int) -> bool:
        """Whether the sublayer's input lacks some output; the model's first sublayers have none to lack."""
        return min(self._delays[layer, sublayer], 2 * layer + sublayer) > 0

    def replace(self, arrays: Mapping[Key, Stored]) -> None:
        self.source = dataclasses.replace(self.source, arrays={**self.source.arrays, **arrays})
        self._params[False].cache_clear()

    def params(self, layer: int, *, original: bool = False) -> nn.Params:
        """A layer's arrays on the devices. original: as they were before `replace`."""
        return self._params[original](layer, original)

    def advance(self, layer: int, sublayer: int, *, original: bool = False) -> None:
        """All batches through one sublayer. original: as the standard model computes it, from `original`'s arrays."""
        params, delay = self.params(layer, original=original), 0 if original else self._delays[layer, sublayer]
        run = self._of_stack(layer).advance[sublayer]
        self.streams = [
            jax.device_get(run(params, self._place(streams, self._programs.dims), jnp.int32(delay)))
            for streams in self.streams
        ]

    def statistics(self, layer: int, sublayer: int, *, targets: Sequence[np.ndarray] | None = None) -> Statistics:
        """Of the sublayer's late input, and its whole one or each batch's `targets`, streams [B, T, D]."""
        total, delay = Statistics.zero(self.definition.config.d_model), jnp.int32(self._delays[layer, sublayer])
        targets = [streams.newest_first[0] for streams in self.streams] if targets is None else targets
        for streams, target, (_, weights) in zip(self.streams, targets, self.batches, strict=True):
            arguments = self._place((streams, target), (self._programs.dims, "BTD"))
            total.add(*jax.device_get(self._programs.statistics(*arguments, delay, self._place(weights, "B"))))
        return total

    def output_statistics(
        self, layer: int, sublayer: int, *, goals: Sequence[np.ndarray] | None = None
    ) -> OutputStatistics:
        """Of the sublayer's output, and the one that `original`'s arrays give of the whole input or each batch's
        `goals`, [B, T, D].
        """
        total, delay, dims = OutputStatistics(), jnp.int32(self._delays[layer, sublayer]), self._programs.dims
        if goals is None:
            output, params = self._of_stack(layer).output[sublayer], self.params(layer, original=True)
            goals = [jax.device_get(output(params, self._place(x, dims), jnp.int32(0))) for x in self.streams]
        run, params = self._of_stack(layer).output_statistics[sublayer], self.params(layer)
        for streams, goal, (_, weights) in zip(self.streams, goals, self.batches, strict=True):
            arguments = self._place((streams, goal), (dims, "BTD"))
            total.add(*jax.device_get(run(params, *arguments, delay, self._place(weights, "B"))))
        return total

    def _of_stack(self, layer: int) -> Programs:
        return programs(self.definition, stack_of(self.definition.config, layer)[0])

    def _layer(self, layer: int, original: bool):
        source = dataclasses.replace(self.original, model=self.source.model) if original else self.source
        stack, place = stack_of(source.model, layer)
        keys = [key for key in source.arrays if key.layer == place and key.name.startswith(f"{stack}/")]
        arrays = reader(source, self.definition)(keys)
        flat = {key.name.removeprefix(f"{stack}/"): array for key, array in zip(keys, arrays, strict=True)}
        return traverse_util.unflatten_dict(flat, sep="/")


def _batches(rows: np.ndarray, *, multiple: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [B, T], weights [B]) of equal shape; the rows that fill the last batch have the weight 0."""
    size = -(-min(ROWS, len(rows)) // multiple) * multiple
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        missing = size - len(part)
        weights = np.repeat(np.float32([1, 0]), [len(part), missing])
        yield np.pad(part, ((0, missing), (0, 0))).astype(np.int32), weights
