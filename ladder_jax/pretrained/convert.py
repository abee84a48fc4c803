"""The verb `convert`: write a pretrained model in another format, or with ladder layers.

Calibration texts, if there are any, serve the choice of layers, and what follows in them the refit
of the chosen ones.
"""

import dataclasses
import functools
import json
import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ladder_jax import nn, parallel
from ladder_jax.config import Json, ModelConfig
from ladder_jax.config.fields import member, natural
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError
from ladder_jax.files import check_storable, on_disk, text_of
from ladder_jax.pretrained import formats, refit as refits, sensitivity, staging
from ladder_jax.pretrained.formats import Format
from ladder_jax.pretrained.huggingface import config as huggingface_config
from ladder_jax.pretrained.refit import SUBLAYERS, FittedProjections, Refit, Refitted
from ladder_jax.pretrained.sensitivity import Search
from ladder_jax.pretrained.source import REFIT, Source

AUTO = "auto:"
ALL = "all"
MEASURED = "sensitivity.json"
MEASURED_TOKENS = 2048
REFIT_TOKENS = 16_384
BYTES = 32  # to read from a calibration text for each requested token
SEQUENCE = 1024  # tokens of its longest rows
TOKENS_A_FEATURE = 8
"""Calibration tokens for each feature that an output projection reads, from which on its fit gains
on other text. With 1.3 and 2.7 it lost (`python -m experiments.refit`).
"""


@dataclasses.dataclass(frozen=True)
class Text:
    """A calibration text: a file. weight: its share of the tokens, relative to the other texts'
    weights.
    """

    path: str
    weight: float = 1.0


def parse_text(argument: str) -> Text:
    """The text of an argument FILE or FILE:WEIGHT. Raises UserError for a weight that is not
    positive.
    """
    path, colon, weight = argument.rpartition(":")
    if not colon:
        return Text(argument)
    try:
        text = Text(path, float(weight))
    except ValueError:  # a file's name may have a colon
        return Text(argument)
    if not 0 < text.weight < float("inf"):
        raise UserError(f"--calibration {argument!r}: the weight must be positive, not {weight}")
    return text


def rows_of(
    texts: Sequence[Text],
    *,
    tokenizer: Tokenizer,
    tokens: int,
    skip: int = 0,
    context: int | None = None,
) -> np.ndarray:
    """Rows of tokens [n, T + 1] from the texts, after their first `skip` tokens; n x T is at most
    `tokens`.

    skip, tokens: divided among the texts by their weights. context: the longest sequence that the
    model was trained for; None if unknown. T is at most that, 1,024, and the shortest text's share.
    Consecutive rows share one token, so that each token except the first is predicted once. Raises
    UserError if a text is shorter than one row.
    """
    whole = sum(text.weight for text in texts)
    # Rounded down: else twice as heavy a text may lack one token for its second row. A whole share may
    # come out just below.
    shares = [max(1, int(tokens * text.weight / whole + 1e-6)) for text in texts]
    length = min(SEQUENCE, context or SEQUENCE, *shares)
    rows = []
    for text, share in zip(texts, shares):
        first = round(skip * text.weight / whole)
        end = first + share + 1
        beginning = text_of(on_disk(text.path), named=True, most=BYTES * end)
        found = np.array(tokenizer.encode(beginning), np.int32)
        least = first + length + 1
        if len(found) < least:
            raise UserError(
                f"--calibration {text.path!r} has {len(found)} tokens; measuring needs at least {least}"
                " (--calibration-tokens N asks for fewer)"
            )
        windows = sliding_window_view(found[first:end], length + 1)
        rows.append(windows[::length])
    return np.concatenate(rows)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is done to a model, checked before any weights are read.

    model: the model to write. With `choose`, all its layers are ladder layers until the choice is
        made.
    choose: the number of layers to choose by measurement, or None.
    refit: None to keep the weights as they are.
    tokens: of the calibration texts to refit on; the layers are chosen on MEASURED_TOKENS before
        them, or as many. Without a refit all are to choose on.
    """

    model: ModelConfig
    choose: int | None
    calibration: tuple[Text, ...]
    tokens: int
    refit: Refit | None


def parse(args: dict, model: ModelConfig) -> Request:
    """The request of a command line. model: the source's. Raises UserError for options that exclude
    each other.
    """
    layers = args["ladder_layers"]
    choose = None
    if layers is not None and layers.startswith(AUTO):
        choose = _count(layers, model)
        layers = ALL
    fitted = None
    if args["refit"] is not None:
        fitted = member(FittedProjections, "value for --refit:", args["refit"])
    _check(args, choose=choose, fitted=fitted)
    refits = fitted is not FittedProjections.NONE
    tokens = args["calibration_tokens"] or (REFIT_TOKENS if refits else MEASURED_TOKENS)
    refit = None
    if args["calibration"] and refits:
        ridge = Refit.ridge if args["ridge"] is None else args["ridge"]
        refit = Refit(ridge, fitted or FittedProjections.INPUTS)
    texts = tuple(map(parse_text, args["calibration"] or ()))
    return Request(_with_layers(args, model, layers), choose, texts, tokens, refit)


def _check(args: dict, *, choose: int | None, fitted: FittedProjections | None) -> None:
    """Raises UserError for an option without the one that it is for."""
    text = "a text: name one by --calibration FILE"
    refits = fitted is not FittedProjections.NONE
    needs = {
        "search": (choose is not None, "--ladder-layers auto:N"),
        "calibration": (args["ladder_layers"], "--ladder-layers, the layers to convert"),
        "ridge": (args["calibration"] and refits, f"--refit inputs or both, and {text}"),
        "calibration_tokens": (args["calibration"], text),
        "tensor": (args["calibration"], text),
        "refit": (args["calibration"] or not refits, text),
    }
    for name, (has, what) in needs.items():
        if args[name] is not None and not has:
            raise UserError(f"--{name.replace('_', '-')} needs {what}")
    if choose is not None and not args["calibration"]:
        raise UserError(f"--ladder-layers {args['ladder_layers']} measures the layers on {text}")
    if args["calibration"] and not refits and choose is None:
        raise UserError(
            "--calibration is for --refit inputs and both, and for --ladder-layers auto:N"
        )


def _projections(model: ModelConfig, *, tokens: int) -> FittedProjections:
    """What to fit on so many tokens: the inputs; with enough of them, the outputs too."""
    features = model.num_heads * model.head_dim
    if model.moe is None or model.moe.dense_layers:
        features = max(features, model.d_ff)
    if tokens >= TOKENS_A_FEATURE * features:
        return FittedProjections.BOTH
    return FittedProjections.INPUTS


def _with_layers(args: dict, model: ModelConfig, layers: str | None) -> ModelConfig:
    dtype = args["dtype"]
    if dtype:
        model = dataclasses.replace(model, dtype=dtype, residual_dtype=dtype)
    model = formats.with_ladder_layers(
        model,
        ladder_layers=layers,
        residual=args["residual"],
        ranks=args["ranks"],
        name=args["source"],
    )
    if layers == ALL:
        return dataclasses.replace(model, ladder_layers=None)
    return model


def _count(layers: str, model: ModelConfig) -> int:
    count = natural(layers.removeprefix(AUTO))
    if not 1 <= count <= model.num_layers:
        raise UserError(
            f"--ladder-layers {layers}: the number must be from 1 to the model's {model.num_layers} layers"
        )
    return count


def run(args: dict) -> None:
    """Convert, and print a summary. Raises UserError and RunFailed; then nothing has been
    written.
    """
    name = args["source"]
    source = formats.open_source(name)
    if args["ladder_layers"] is not None:
        formats.check_not_refitted(source.refit, name=name)
    destination = on_disk(args["destination"]).absolute()
    format = member(Format, "format in --to", args["to"])
    search = member(Search, "value for --search:", args["search"] or Search.GREEDY)
    request = parse(args, source.model)
    model = request.model
    # raises UserError if it cannot be split over its ranks
    nn.define(model, mesh=parallel.make_mesh())
    if format is Format.HUGGING_FACE:  # not after hours of measuring and refitting
        huggingface_config.check(model)
    else:
        check_storable("", destination)
    settings = request.refit
    staging.check_free(destination)
    copies = 1 if settings is None else 2  # the fitted arrays are kept until all is written
    staging.check_room(destination, size=copies * source.nbytes)
    measured, fitted = read_texts(source, request)
    if settings is not None and args["refit"] is None:  # a text may be shorter than what was asked
        projections = _projections(model, tokens=fitted.size)
        settings = dataclasses.replace(settings, projections=projections)
    result = None
    refitted = Refitted(source, ())
    mesh = parallel.make_mesh(tensor=args["tensor"] or 1)
    with staging.staged(destination, resumes=settings is not None) as folder:
        kept = folder.with_name("refitted")  # what an interrupted run has done
        refit = functools.partial(refits.refit, source, rows=fitted, mesh=mesh, folder=kept)
        if request.choose is not None:
            converted = None
            if settings is not None:  # each layer as if it were the only converted one
                alone = dataclasses.replace(settings, alone=True)
                converted = refit(model=model, settings=alone).source
            definition = nn.define(model, mesh=mesh)
            how = dict(choose=request.choose, search=search, converted=converted)
            result = sensitivity.measure(definition, source, measured, **how)
            chosen = sensitivity.listed(result[result["chosen"]]["layers"])
            model = dataclasses.replace(model, ladder_layers=chosen)
        if settings is not None:
            refitted = refit(model=model, settings=settings)
        converted = dataclasses.replace(refitted.source, model=model)
        formats.write(converted, folder, format=format, place=destination)
        sublayers = [dataclasses.asdict(fit) for fit in refitted.fits]
        if result is not None:
            _write_json(folder / MEASURED, result)
        if settings is not None:
            about = {
                "ridge": settings.ridge,
                "tokens": fitted.size,
                "sequence": fitted.shape[1],
                "texts": [dataclasses.asdict(text) for text in request.calibration],
                "sublayers": sublayers,
            }
            _write_json(folder / REFIT, about)
    summary = {
        "source": source.path,
        "destination": str(destination),
        "format": format.value,
        "parameters": source.parameters,
        "residual": model.residual,
        "ladder_layers": model.ladder_layers,
        "ranks": model.ranks,
        "sensitivity": result,
        "refit": sublayers,
    }
    if args["json"]:
        print(json.dumps(summary))
    else:
        _print(**summary)


def read_texts(source: Source, request: Request) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Rows of tokens: [n, T + 1] on which the layers are chosen, and [n, T] on which they are
    refitted. None: they are not.

    Rows are no longer than the sequences that the model was trained on; at other positions its
    activations are others. Raises UserError for texts that cannot be read, or are too short.
    """
    if not request.calibration:
        return None, None
    if source.tokenizer is None:
        raise UserError(f"{source.path!r} has no tokenizer, which --calibration needs")
    about = dict(tokenizer=source.tokenizer, context=source.context)
    skip = 0
    measured = None
    fitted = None
    if request.choose is not None:
        skip = min(request.tokens, MEASURED_TOKENS) if request.refit else request.tokens
        measured = rows_of(request.calibration, tokens=skip, **about)
    if request.refit is not None:
        fitted = rows_of(request.calibration, tokens=request.tokens, skip=skip, **about)[:, :-1]
    return measured, fitted


def _write_json(file: pathlib.Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print(
    *,
    destination: str,
    parameters: int,
    residual: str,
    ladder_layers: str | None,
    sensitivity: Json | None,
    refit: list[Json],
    **_: Any,
) -> None:
    layers = "" if ladder_layers is None else f", ladder layers {ladder_layers}"
    print(f"{destination}: {parameters:,} parameters, {residual}{layers}")
    inputs = [fit for fit in refit if fit["sublayer"] in SUBLAYERS]
    outputs = [fit for fit in refit if fit not in inputs]
    if inputs:
        about = f"{_means(inputs)}; each sublayer's is in {REFIT}"
        print(f"refitted {len(inputs)} sublayers: the late inputs lacked {about}")
    if outputs:
        print(f"behind these inputs, the sublayers' outputs lacked {_means(outputs)}")
    if sensitivity is not None:
        chosen = sensitivity["chosen"]
        print(
            f"of the choices of layers {chosen!r} costs least: {sensitivity[chosen]['cost']:.4f} nats a token over the"
            f" standard model's {sensitivity['loss']:.4f}; all are in {os.path.join(destination, MEASURED)}"
        )


def _means(fits: Sequence[Json]) -> str:
    before = statistics.fmean(fit["before"] for fit in fits)
    after = statistics.fmean(fit["after"] for fit in fits)
    return f"{before:.1%} of the whole ones (mean square), and lack {after:.1%} now"
