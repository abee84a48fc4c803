"""Converts, refits and scores one row."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from experiments.refit import ways
from experiments.refit.plan import FRESH_RANKS, STEPS, Row, Way
from experiments.refit.texts import Texts
from experiments.refit.trained import trained
from ladder_jax import nn, parallel, pretrained
from ladder_jax.config import ModelConfig
from ladder_jax.nn.modules import normalise
from ladder_jax.pretrained import Source
from ladder_jax.pretrained.refit import projections
from ladder_jax.pretrained.refit.fit import Fit, Pass
from ladder_jax.pretrained.refit.least_squares import Statistics
from ladder_jax.pretrained.source import Key, Stored

DEEPEST = "ladder-3"  # keeps the streams of four sublayers, as many as any row's topology reads
KEPT = 4  # texts whose streams are kept


class Study:
    """The model and the texts; and what rows share: streams that enter the first converted layer, and gradients."""

    def __init__(self, source: Source, texts: Texts):
        self.source, self.texts, self._streams = source, texts, {}
        self._gradients = functools.lru_cache(maxsize=1)(self._gradients_on)

    def measure(self, row: Row) -> dict:
        """The row's losses by domain, in nats a token, and what its fits left of the missing input."""
        began, model, source, fits = time.perf_counter(), self._model(row), self.source, []
        held_out = np.concatenate([self.texts.held_out[domain] for domain in row.scored])
        scored, first = self._begin(model, rows=held_out[:, :-1])
        if row.way in ways.SURROGATES:
            fits, first = self._surrogates(row, scored), model.num_layers
        elif row.way is not Way.NONE:
            source, fits = self._refitted(row, model)
            scored.replace(source.arrays)
        if row.way in STEPS:
            source = trained(source, self.source, rows=self._calibration(row), way=row.way)
            scored, first = Pass(_definition(model), source, held_out[:, :-1]), 0
        fitted = time.perf_counter()
        for layer in range(first, model.num_layers):
            for index in (0, 1):
                scored.advance(layer, index)
        streams = np.concatenate([streams.newest_first[0] for streams in scored.streams])
        pairs = zip(row.scored, streams, held_out[:, 1:])
        loss = _loss_of(source)
        losses = {domain: float(loss(x, targets)) for domain, x, targets in pairs}
        seconds = {"fit": round(fitted - began, 1), "score": round(time.perf_counter() - fitted, 1)}
        return {**row.asked, "losses": losses, "seconds": seconds, "fits": [dataclasses.asdict(one) for one in fits]}

    def _model(self, row: Row) -> ModelConfig:
        if row.layers == "0":
            return self.source.model
        ranks = FRESH_RANKS if row.residual == "ladder-fresh" else None
        return dataclasses.replace(self.source.model, residual=row.residual, ladder_layers=row.layers, ranks=ranks)

    def _calibration(self, row: Row) -> np.ndarray:
        return self.texts.calibration(row.text, tokens=row.tokens, seed=row.seed)

    def _begin(self, model: ModelConfig, *, rows: np.ndarray) -> tuple[Pass, int]:
        """A pass on `rows` that has gone as far as the first converted layer, and that layer."""
        run = Pass(_definition(model), self.source, rows)
        first = next((n for n in range(model.num_layers) if run.converted(n)), 0)
        if first == 0 or model.ranks is not None:  # each rank's partial sum is not kept
            return run, 0
        name = (hashlib.sha256(rows.tobytes()).digest(), first)
        if name not in self._streams:
            deep = dataclasses.replace(model, residual=DEEPEST)
            before = Pass(_definition(deep), self.source, rows)
            for layer in range(first):
                before.advance(layer, 0)
                before.advance(layer, 1)
            self._streams[name] = before.streams
        self._streams[name] = self._streams.pop(name)  # now the newest
        if len(self._streams) > KEPT:
            self._streams.pop(next(iter(self._streams)))
        depth = len(run.streams[0].newest_first)
        shallow = lambda streams: dataclasses.replace(streams, newest_first=streams.newest_first[:depth])
        run.streams = [shallow(streams) for streams in self._streams[name]]
        return run, first

    def _refitted(self, row: Row, model: ModelConfig) -> tuple[Source, list[Fit]]:
        """As `pretrained.refit.refit`, of whose parts it is made, and in the ways that are not in the library."""
        (run, first), fits, original = self._begin(model, rows=self._calibration(row)), [], None
        if row.way in (Way.ORIGINAL, Way.STREAM):
            original, _ = self._begin(model, rows=self._calibration(row))
        for layer in range(first, model.num_layers):
            for index, name in enumerate(projections.SUBLAYERS):
                if fitted := run.late(layer, index) or row.layers == "0":
                    statistics = self._statistics(row, run, layer, index, original=original)
                    settings = dict(layer=layer, sublayer=name, ridge=row.ridge)
                    arrays, matrices = projections.refitted_arrays(run.source, statistics, **settings)
                    run.replace({key: Stored(a.shape, a.dtype, lambda a=a: a) for key, a in arrays.items()})
                    fits.append(Fit(layer, name, statistics.share_missing(), statistics.share_missing(matrices)))
                if original is not None:
                    original.advance(layer, index, original=True)
                if fitted and row.way in (Way.OUTPUTS, Way.STREAM):
                    run.replace(self._output(row, run, layer, index, original=original))
                run.advance(layer, index)
        return run.source, fits

    def _output(self, row: Row, run: Pass, layer: int, index: int, *, original: Pass | None) -> Mapping[Key, Stored]:
        """original: after the sublayer."""
        goals, key = None, projections.output_key(layer, projections.SUBLAYERS[index], model=run.source.model)
        if original is not None:
            pairs = zip(original.streams, run.streams, strict=True)
            goals = [after.newest_first[0] - before.newest_first[0] for after, before in pairs]
        statistics = run.output_statistics(layer, index, goals=goals)
        array, _ = projections.refitted_output(run.source.arrays[key].read(), statistics, ridge=row.ridge)
        return {key: Stored(array.shape, array.dtype, lambda: array)}

    def _statistics(self, row: Row, run: Pass, layer: int, index: int, *, original: Pass | None) -> Statistics:
        if row.way in (Way.FISHER, Way.GRADIENT):
            weights = self._gradients(row.text, row.tokens, row.seed)[layer, index]
            return ways.weighted(run, layer, index, weights=weights if row.way is Way.FISHER else np.sqrt(weights))
        targets = [streams.newest_first[0] for streams in original.streams] if row.way is Way.ORIGINAL else None
        statistics = run.statistics(layer, index, targets=targets)
        return diagonal(statistics) if row.way is Way.SCALES else statistics

    def _surrogates(self, row: Row, scored: Pass) -> list[Fit]:
        """As `_refitted`, of what is no checkpoint: `scored` advances with what it is fitted on, to the last layer."""
        model, fits = scored.definition.config, []
        run, first = self._begin(model, rows=self._calibration(row))
        for layer in range(first, model.num_layers):
            for index, name in enumerate(projections.SUBLAYERS):
                if run.late(layer, index) or row.layers == "0":
                    left = ways.surrogate((run, scored), layer, index, way=row.way, ridge=row.ridge)
                    fits.append(Fit(layer, name, *left))
                else:
                    run.advance(layer, index)
                    scored.advance(layer, index)
        return fits

    def _gradients_on(self, text: str, tokens: int, seed: int) -> np.ndarray:
        definition, rows = _definition(self.source.model), self.texts.calibration(text, tokens=tokens, seed=seed)
        params, loss = pretrained.load(self.source, mesh=definition.layout.mesh), _loss_of(self.source)
        return ways.gradients(definition, params, lambda x, targets: len(targets) * loss(x, targets), rows)


def diagonal(statistics: Statistics) -> Statistics:
    """Without the products of different components, so that M is diagonal."""
    width = statistics.products.shape[1]
    return dataclasses.replace(statistics, products=statistics.products * np.tile(np.eye(width), (1, 2)))


def _loss_of(source: Source) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Of the last stream [T, D] and its targets [T], their mean."""
    head = "embedding/table" if source.model.tie_embeddings else "head/table"
    table, gain = (jnp.asarray(source.arrays[Key(name)].read()) for name in (head, "final_norm/scale"))
    return lambda x, targets: _loss(x, gain, table, targets, source.model.norm_eps)


def _definition(model: ModelConfig) -> nn.ModelDef:
    return nn.define(model, mesh=parallel.make_mesh())


@jax.jit
def _loss(stream, gain, table, targets, eps):
    logits = (normalise(stream, eps=eps) * gain[None]) @ table.T.astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0])
