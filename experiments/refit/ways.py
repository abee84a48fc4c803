"""The ways to fit that the library does not offer. On one device.

A sublayer is computed here from its normalised input, so that any function of the late streams can stand for that.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax

from experiments.refit.plan import Way
from ladder_jax import nn, residual
from ladder_jax.nn.modules import LayerContext, normalise
from ladder_jax.pretrained.refit.least_squares import Statistics
from ladder_jax.pretrained.refit.passes import Pass

RANK = 64  # of Way.LOW_RANK
SURROGATES = (Way.PREVIOUS, Way.LOW_RANK)
"""The ways that change the program."""


class OfNormalised:
    """A wire from a sublayer's normalised input, in place of a state, to its output."""

    def advance(self, x, step, sublayers):
        return sublayers[step.sublayers[0]].of_normalised(x)


@functools.cache
def sublayer(definition: nn.ModelDef, index: int):
    """Compiled: (layer's params, normalised input [B, T, D]) -> its output [B, T, D]."""

    @jax.jit
    def run(params, normed):
        context = LayerContext.of(definition.config, normed.shape[1], axes=())
        layer = definition.bind("layers", params)
        return layer(normed, steps=(residual.Step((index,)),), wire=OfNormalised(), contexts=[context])[0]

    return run


@dataclasses.dataclass(frozen=True)
class Sums:
    """Of features [n, K] and targets [n, D], over tokens, in float64: gram [K, K], cross [K, D], and the targets'
    squares; each batch is summed in float32.
    """

    gram: np.ndarray
    cross: np.ndarray
    energy: float

    def solve(self, *, prior: np.ndarray, ridge: float) -> np.ndarray:
        """M [K, D] = argmin |features M - targets|^2 + l |M - prior|^2, with l as in the library."""
        penalty = ridge * np.trace(self.gram) / len(self.gram)
        return scipy.linalg.solve(
            self.gram + penalty * np.eye(len(self.gram)), self.cross + penalty * prior, assume_a="pos"
        )

    def left(self, matrix: np.ndarray) -> float:
        """|features M - targets|^2 over |targets|^2."""
        return float(1 + np.sum(matrix * (self.gram @ matrix - 2 * self.cross)) / self.energy)


def sums(batches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> Sums:
    """Of (features [B, T, K], targets [B, T, D], weights [B, T]), each batch."""
    gram = cross = energy = 0.0
    for features, targets, weights in batches:
        flat = lambda x: np.asarray(x, np.float32).reshape(-1, x.shape[-1])
        features, targets, weights = flat(features), flat(targets), np.asarray(weights, np.float32).reshape(-1, 1)
        weighted = (weights * features).T
        gram = gram + (weighted @ features).astype(np.float64)
        cross = cross + (weighted @ targets).astype(np.float64)
        energy += float(np.sum(weights * targets * targets, dtype=np.float64))
    return Sums(gram, cross, energy)


def weighted(run: Pass, layer: int, index: int, *, weights: np.ndarray) -> Statistics:
    """As `run.statistics`, each token by its entry of `weights`, of all rows [n, T]."""
    batches, ends = [], np.cumsum([len(tokens) for tokens, _ in run.batches])
    for streams, (tokens, _), end in zip(run.streams, run.batches, ends, strict=True):
        some = weights[end - len(tokens) : end]
        padded = np.pad(some, ((0, len(tokens) - len(some)), (0, 0)))
        batches.append((*_inputs(run, streams, layer, index), padded))
    total = sums(batches)
    products = np.concatenate([total.gram, total.cross], axis=1)[None]
    return Statistics(products, total.energy, np.array([total.energy * total.left(np.eye(len(total.gram)))]))


def surrogate(runs: tuple[Pass, Pass], layer: int, index: int, *, way: Way, ridge: float) -> tuple[float, float]:
    """Fits on the first run what stands for the sublayer's whole input, and advances both by it; what is missing
    before and after the fit, relative to what is fitted.
    """
    fitted, compute = runs[0], sublayer(runs[0].definition, index)

    def batches():
        for streams, (_, rows) in zip(fitted.streams, fitted.batches, strict=True):
            late, whole = _inputs(fitted, streams, layer, index)
            if way is Way.LOW_RANK:  # the map is before the norm, so its target keeps the late stream's scale
                whole = streams.newest_first[0] * _scale(fitted, streams, layer, index)
            yield _features(late, way), whole, np.repeat(rows[:, None], late.shape[1], axis=1)

    total = sums(batches())
    prior = np.eye(*total.cross.shape)
    matrix = total.solve(prior=prior, ridge=ridge)
    if way is Way.LOW_RANK:  # the best of this rank for the change of the features (Izenman, 1975)
        change = matrix - prior
        _, vectors = scipy.linalg.eigh(
            change.T @ total.gram @ change, subset_by_index=(max(0, len(prior) - RANK), len(prior) - 1)
        )
        matrix = prior + change @ vectors @ vectors.T
    placed = jnp.asarray(matrix, jnp.float32)
    for run in runs:
        run.streams = [_advanced(run, compute, streams, layer, index, placed, way) for streams in run.streams]
    return total.left(prior), total.left(matrix)


def gradients(definition: nn.ModelDef, params: nn.Params, loss: Callable, rows: np.ndarray) -> np.ndarray:
    """The squared norms [L, 2, n, T] of the gradients of each row's summed loss with respect to the sublayers'
    normalised inputs, in a standard model. loss: of (the last stream [T - 1, D], targets [T - 1]). rows: [n, T].
    """
    config = definition.config

    @jax.jit
    def norms(params, row):
        def total(changes):
            def layer(x, entry):
                of_layer, change = entry
                for index in (0, 1):
                    x = x + sublayer(definition, index)(of_layer, normalise(x, eps=config.norm_eps) + change[index])
                return x, None

            x = params["embedding"]["table"][row[None]].astype(jnp.float32)
            return loss(lax.scan(jax.checkpoint(layer), x, (params["layers"], changes))[0][0, :-1], row[1:])

        shape = (config.num_layers, 2, 1, len(row), config.d_model)
        return jnp.sum(jnp.square(jax.grad(total)(jnp.zeros(shape, jnp.float32))), axis=(2, 4))

    return np.stack([jax.device_get(norms(params, row)) for row in rows], axis=2)


def _inputs(run: Pass, streams, layer: int, index: int) -> tuple[jax.Array, jax.Array]:
    """The sublayer's late and its whole input, normalised [B, T, D]."""
    norm = functools.partial(normalise, eps=run.definition.config.norm_eps)
    return norm(_late(run, streams, layer, index)), norm(streams.newest_first[0])


def _late(run: Pass, streams, layer: int, index: int) -> jax.Array:
    return streams.newest_first[residual.of_model(run.definition.config).delays[2 * layer + index]]


def _scale(run: Pass, streams, layer: int, index: int) -> np.ndarray:
    """What the norm multiplies the late stream by, [B, T, 1]."""
    late = _late(run, streams, layer, index)
    return 1 / np.sqrt(np.mean(np.square(late), axis=-1, keepdims=True) + run.definition.config.norm_eps)


def _features(late: jax.Array, way: Way) -> jax.Array:
    if way is Way.LOW_RANK:
        return late
    return jnp.concatenate([late, jnp.pad(late[:, :-1], ((0, 0), (1, 0), (0, 0)))], axis=-1)


def _advanced(run: Pass, compute, streams, layer: int, index: int, matrix: jax.Array, way: Way):
    late, _ = _inputs(run, streams, layer, index)
    normed = _features(late, way) @ matrix
    if way is Way.LOW_RANK:
        normed = normalise(normed, eps=run.definition.config.norm_eps)
    newest = streams.newest_first[0] + jax.device_get(compute(run.params(layer), normed))
    return dataclasses.replace(streams, newest_first=(newest, *streams.newest_first[:-1]))
