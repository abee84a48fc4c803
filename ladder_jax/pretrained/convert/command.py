"""The verb `convert`."""

import dataclasses
import itertools
import json
import math
import pathlib

from ladder_jax import nn, parallel, pyplot
from ladder_jax.data import tokenizer as tokenizers
from ladder_jax.errors import UserError
from ladder_jax.pretrained import formats, sensitivity, staging
from ladder_jax.pretrained.convert import native
from ladder_jax.pretrained.convert.request import Format, Request, parse
from ladder_jax.pretrained.huggingface import write as huggingface
from ladder_jax.pretrained.load import load
from ladder_jax.pretrained.sensitivity import Result, picture, text
from ladder_jax.pretrained.source import Source
from ladder_jax.progress import progress

MEASURED = "sensitivity"
"""The name of the measurement's files in the output folder: .json and, if matplotlib is installed, .png."""


def run(args: dict) -> None:
    """Convert, and print a summary. Raises UserError and RunFailed; then nothing has been written."""
    source = formats.open_source(args["source"])
    request = parse(args, source.model)
    definition = nn.define(
        request.model, mesh=parallel.make_mesh()
    )  # raises if the model cannot be split over its ranks
    staging.check_free(request.destination)
    staging.check_room(request.destination, size=native.size(source))
    result = None
    if request.choose is not None:
        result = measure(source, request)
        if not args["json"]:
            text.show(result)
        model = dataclasses.replace(request.model, ladder_layers=result.ladder_layers)
        definition = nn.define(model, mesh=parallel.make_mesh())
    with staging.staged(request.destination) as folder:
        write(source, folder, definition=definition, request=request)
        if result is not None:
            (folder / f"{MEASURED}.json").write_text(json.dumps(result.as_dict(), indent=1) + "\n", encoding="utf-8")
            if pyplot.installed():
                picture.plot(result, file=str(folder / f"{MEASURED}.png"))
    _print_summary(source, definition, request, result, as_json=args["json"])


def write(source: Source, folder: pathlib.Path, *, definition: nn.ModelDef, request: Request) -> None:
    """Write `source` with `definition`'s topology into `folder`, in the requested format."""
    if request.format is Format.CHECKPOINT:
        native.write(source, folder, definition=definition, place=request.destination)
        return
    converted = dataclasses.replace(source, model=definition.config)
    with progress(len(source.arrays), label="written {done}/{total} arrays") as update:
        done = itertools.count(1)
        huggingface.write(converted, folder, done=lambda key: update(next(done), ""))


def measure(source: Source, request: Request) -> Result:
    """The layers' sensitivity on the calibration text. Raises UserError for an unsuitable text or mesh."""
    rows = sensitivity.rows_of(
        request.calibration,
        tokenizer=_tokenizer(source),
        tokens=request.calibration_tokens,
        vocab_size=source.model.vocab_size,
    )
    mesh = parallel.make_mesh(tensor=request.tensor)
    definition = nn.define(request.model, mesh=mesh)
    params = load(dataclasses.replace(source, model=request.model), mesh=mesh)
    choice = dict(choose=request.choose, search=request.search)
    total = sensitivity.count(rows, num_layers=source.model.num_layers, **choice)
    with progress(total, label="measured {done}/{total} losses") as update:
        done = itertools.count(1)
        return sensitivity.measure(definition, params, rows, on_loss=lambda: update(next(done), ""), **choice)


def _tokenizer(source: Source) -> tokenizers.Tokenizer:
    if source.tokenizer is None:
        raise UserError(f"{source.path!r} has no tokenizer, which --calibration needs")
    return source.tokenizer


def _print_summary(
    source: Source, definition: nn.ModelDef, request: Request, result: Result | None, *, as_json: bool
) -> None:
    model, parameters = definition.config, sum(math.prod(array.shape) for array in source.arrays.values())
    if as_json:
        summary = {"source": source.path, "destination": str(request.destination), "format": request.format.value}
        summary |= {"parameters": parameters, "residual": model.residual, "ladder_layers": model.ladder_layers}
        summary |= {"ranks": model.ranks, "sensitivity": None if result is None else result.as_dict()}
        print(json.dumps(summary))
        return
    layers = "" if model.ladder_layers is None else f", ladder layers {model.ladder_layers}"
    print(f"{request.destination}: {parameters:,} parameters, {model.residual}{layers}; read back and compared")
    if result is not None:
        picture_file = f" and {MEASURED}.png" if pyplot.installed() else "; its picture needs 'ladder-jax[plot]'"
        print(f"the measurement is in {request.destination}, in {MEASURED}.json{picture_file}")
