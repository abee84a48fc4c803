"""The part of a conversion that reads calibration texts: the choice of layers, and the refit of the chosen ones."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np

from ladder_jax import nn, parallel
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.pretrained import refit, sensitivity
from ladder_jax.pretrained.convert.request import Request
from ladder_jax.pretrained.load import load
from ladder_jax.pretrained.refit import Refit, Refitted
from ladder_jax.pretrained.source import Key, Source
from ladder_jax.progress import progress


@dataclasses.dataclass(frozen=True)
class Texts:
    """Rows of tokens [n, T + 1]: on which the layers are chosen, and, after them in the texts, on which they are
    refitted. None where that was not requested.
    """

    measured: np.ndarray | None
    refit: np.ndarray | None


def read_texts(source: Source, request: Request) -> Texts:
    """Rows no longer than the sequences that the model was trained on; at other positions its activations are others.

    Raises UserError for texts that cannot be read, or are too short.
    """
    if not request.calibration:
        return Texts(None, None)
    about = dict(tokenizer=tokenizer_of(source), vocab_size=source.model.vocab_size, context=source.context)
    rows = lambda tokens, skip: sensitivity.rows_of_texts(request.calibration, tokens=tokens, skip=skip, **about)
    skip, measured, fitted = 0, None, None
    if request.choose is not None:
        measured, skip = rows(request.measured_tokens, 0), request.measured_tokens
    if request.refit is not None:
        fitted = rows(request.refit_tokens, skip)
        refit.check_rows(fitted[:, :-1], model=request.model)
    return Texts(measured, fitted)


def choose(source: Source, request: Request, texts: Texts, *, folder: pathlib.Path | None) -> sensitivity.Result:
    """The layers' sensitivity; with a refit, that of each layer refitted as if it were the only converted one."""
    mesh = parallel.make_mesh(tensor=request.tensor)
    definition = nn.define(request.model, mesh=mesh)
    if request.refit is None:
        params = load(dataclasses.replace(source, model=request.model), mesh=mesh)
    else:
        alone = dataclasses.replace(request.refit, alone=True)
        converted = fit(source, request, texts, settings=alone, mesh=mesh, folder=folder).source
        params = load(_standard_and(converted, source=source), mesh=mesh)
    choice = dict(choose=request.choose, search=request.search)
    total = sensitivity.count(texts.measured, num_layers=source.model.num_layers, **choice)
    with progress(total, label="measured {done}/{total} losses") as update:
        done = itertools.count(1)
        on_loss = lambda: update(next(done), "")
        return sensitivity.measure(definition, params, texts.measured, on_loss=on_loss, **choice)


def fit(
    source: Source,
    request: Request,
    texts: Texts,
    *,
    settings: Refit,
    mesh: jax.sharding.Mesh,
    folder: pathlib.Path | None,
) -> Refitted:
    """`source` with `request.model`'s converted layers refitted. folder: keeps what an interrupted run has done."""
    with progress(refit.count(request.model), label="refitted {done}/{total} sublayers") as update:
        done = itertools.count(1)
        on_sublayer = lambda: update(next(done), "")
        shared = dict(model=request.model, mesh=mesh, settings=settings, folder=folder, on_sublayer=on_sublayer)
        return refit.refit(source, rows=texts.refit[:, :-1], **shared)


def tokenizer_of(source: Source) -> tokenizers.Tokenizer:
    """Raises UserError for a source without a tokenizer."""
    if source.tokenizer is None:
        raise UserError(f"{source.path!r} has no tokenizer, which --calibration needs")
    return source.tokenizer


def _standard_and(converted: Source, *, source: Source) -> Source:
    """A source with the layers of `source`, and after them in each stack those of `converted`."""
    model = source.model
    after = lambda key: Key(key.name, key.layer + len(key.layers(model)))
    later = {after(key): array for key, array in converted.arrays.items() if key.layer is not None}
    moe = model.moe and dataclasses.replace(model.moe, dense_layers=2 * model.moe.dense_layers)
    twice = dataclasses.replace(model, num_layers=2 * model.num_layers, moe=moe)
    return dataclasses.replace(source, model=twice, arrays={**source.arrays, **later})
