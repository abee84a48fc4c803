"""Converts, refits and scores one row."""

import dataclasses
import hashlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.refit.plan import FRESH_RANKS, Row, Way
from experiments.refit.texts import Texts
from ladder_jax import nn, parallel
from ladder_jax.config import ModelConfig
from ladder_jax.nn.modules import normalise
from ladder_jax.pretrained import Source
from ladder_jax.pretrained.refit import fit
from ladder_jax.pretrained.refit.fit import Pass
from ladder_jax.pretrained.refit.least_squares import Statistics
from ladder_jax.pretrained.source import Key, Stored

DEEPEST = "ladder-3"  # keeps the streams of four sublayers, as many as any row's topology reads
KEPT = 4  # texts whose streams are kept


class Study:
    """The model and the texts; and the streams that enter a row's first converted layer, which rows share."""

    def __init__(self, source: Source, texts: Texts):
        self.source, self.texts, self._streams = source, texts, {}

    def measure(self, row: Row) -> dict:
        """The row's losses by domain, in nats a token, and what its fits left of the missing input."""
        began, model = time.perf_counter(), self._model(row)
        fits, result = (), self.source
        if row.way is not Way.NONE:
            rows = self.texts.calibration(row.text, tokens=row.tokens, seed=row.seed)
            result, fits = self._refitted(row, model=model, rows=rows)
        fitted = time.perf_counter()
        losses = self.losses(result, model=model, scored=row.scored)
        seconds = {"fit": round(fitted - began, 1), "score": round(time.perf_counter() - fitted, 1)}
        return {**row.asked, "losses": losses, "seconds": seconds, "fits": [dataclasses.asdict(one) for one in fits]}

    def losses(self, source: Source, *, model: ModelConfig, scored: tuple[str, ...]) -> dict[str, float]:
        """Mean nats a token of each scored domain's held-out tokens, in one window."""
        tokens = np.concatenate([self.texts.held_out[domain] for domain in scored])
        run, first = self._begin(source, model=model, rows=tokens[:, :-1])
        for layer in range(first, model.num_layers):
            for sublayer in (0, 1):
                run.advance(layer, sublayer)
        head = "embedding/table" if model.tie_embeddings else "head/table"
        table, gain = (source.arrays[Key(name)].read() for name in (head, "final_norm/scale"))
        streams = np.concatenate([streams.newest_first[0] for streams in run.streams])[: len(tokens)]
        losses = (_loss(x, gain, table, targets, model.norm_eps) for x, targets in zip(streams, tokens[:, 1:]))
        return dict(zip(scored, map(float, losses), strict=True))

    def _model(self, row: Row) -> ModelConfig:
        if row.layers == "0":
            return self.source.model
        ranks = FRESH_RANKS if row.residual == "ladder-fresh" else None
        return dataclasses.replace(self.source.model, residual=row.residual, ladder_layers=row.layers, ranks=ranks)

    def _begin(self, source: Source, *, model: ModelConfig, rows: np.ndarray) -> tuple[Pass, int]:
        """A pass on `rows` that has gone as far as the first converted layer, and that layer."""
        run = Pass(_definition(model), source, rows)
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

    def _refitted(self, row: Row, *, model: ModelConfig, rows: np.ndarray) -> tuple[Source, tuple[fit.Fit, ...]]:
        """As `pretrained.refit.refit`, of whose parts it is made, and in the ways that are not in the library."""
        (run, first), fits, original = self._begin(self.source, model=model, rows=rows), [], None
        if row.way is Way.ORIGINAL:
            original, _ = self._begin(self.source, model=model, rows=rows)
        for layer in range(first, model.num_layers):
            for index, name in enumerate(fit.SUBLAYERS):
                if run.late(layer, index) or row.way is Way.CONTROL:
                    targets = None if original is None else [streams.newest_first[0] for streams in original.streams]
                    statistics = run.statistics(layer, index, targets=targets)
                    if row.way is Way.SCALES:
                        statistics = diagonal(statistics)
                    settings = dict(layer=layer, sublayer=name, ridge=row.ridge)
                    arrays, matrices = fit.refitted_arrays(run.source, statistics, **settings)
                    run.replace({key: Stored(a.shape, a.dtype, lambda a=a: a) for key, a in arrays.items()})
                    fits.append(fit.Fit(layer, name, statistics.share_missing(), statistics.share_missing(matrices)))
                run.advance(layer, index)
                if original is not None:
                    original.advance(layer, index, original=True)
        return run.source, tuple(fits)


def diagonal(statistics: Statistics) -> Statistics:
    """Without the products of different components, so that M is diagonal."""
    width = statistics.products.shape[1]
    return dataclasses.replace(statistics, products=statistics.products * np.tile(np.eye(width), (1, 2)))


def _definition(model: ModelConfig) -> nn.ModelDef:
    return nn.define(model, mesh=parallel.make_mesh())


@jax.jit
def _loss(stream, gain, table, targets, eps):
    logits = (normalise(stream, eps=eps) * gain[None]) @ table.T.astype(jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, targets[:, None], 1)[:, 0])
