"""The verb `convert`."""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import shutil
import statistics
from collections.abc import Sequence

from ladder_jax import nn, parallel, pyplot
from ladder_jax.pretrained import formats, staging
from ladder_jax.pretrained.convert import calibrated, native
from ladder_jax.pretrained.convert.calibrated import Texts
from ladder_jax.pretrained.convert.request import Format, Request, parse
from ladder_jax.pretrained.huggingface import write as huggingface
from ladder_jax.pretrained.refit import SUBLAYERS, Fit, Refitted
from ladder_jax.pretrained.sensitivity import Result, picture, text
from ladder_jax.pretrained.source import REFIT, Source
from ladder_jax.progress import progress

MEASURED = "sensitivity"
"""The name of the measurement's files in the output folder: .json and, if matplotlib is installed, .png."""


def run(args: dict) -> None:
    """Convert, and print a summary. Raises UserError and RunFailed; then nothing has been written."""
    source = formats.open_source(args["source"])
    request = parse(args, source.model)
    # Raises UserError if the model cannot be split over its ranks.
    definition = nn.define(request.model, mesh=parallel.make_mesh())
    staging.check_free(request.destination)
    copies = 1 if request.refit is None else 2  # the fitted arrays are kept until all is written
    staging.check_room(request.destination, size=copies * native.size(source))
    result, refitted, texts = None, None, calibrated.read_texts(source, request)
    resumable = contextlib.nullcontext() if request.refit is None else staging.resumable(request.destination)
    with resumable as kept:
        if request.choose is not None:
            result = calibrated.choose(source, request, texts, folder=kept and kept / "alone")
            if not args["json"]:
                text.show(result)
            model = dataclasses.replace(request.model, ladder_layers=result.ladder_layers)
            request = dataclasses.replace(request, model=model)
            definition = nn.define(model, mesh=parallel.make_mesh())
        if request.refit is not None:
            mesh = parallel.make_mesh(tensor=request.tensor)
            refitted = calibrated.fit(
                source, request, texts, settings=request.refit, mesh=mesh, folder=kept and kept / "chosen"
            )
            source = refitted.source
        with staging.staged(request.destination) as folder:
            write(source, folder, definition=definition, request=request)
            if result is not None:
                _write_json(folder / f"{MEASURED}.json", result.as_dict())
                if pyplot.installed():
                    picture.plot(result, file=str(folder / f"{MEASURED}.png"))
            if refitted is not None:
                _write_json(folder / REFIT, _fits(request, refitted, texts))
            elif source.refit is not None:  # a copy's weights are as they were
                shutil.copyfile(source.refit, folder / REFIT)
    _print_summary(source, definition, request, result, refitted, as_json=args["json"])


def write(source: Source, folder: pathlib.Path, *, definition: nn.ModelDef, request: Request) -> None:
    """Write `source` with `definition`'s topology into `folder`, in the requested format."""
    if request.format is Format.CHECKPOINT:
        native.write(source, folder, definition=definition, place=request.destination)
        return
    converted = dataclasses.replace(source, model=definition.config)
    with progress(len(source.arrays), label="written {done}/{total} arrays") as update:
        done = itertools.count(1)
        huggingface.write(converted, folder, done=lambda key: update(next(done), ""))


def _fits(request: Request, refitted: Refitted, texts: Texts) -> dict:
    """For JSON: the refit's settings, and of each fitted sublayer what its input lacked before and lacks after."""
    about = {"ridge": request.refit.ridge, "tokens": texts.refit[:, :-1].size, "sequence": texts.refit.shape[1] - 1}
    about |= {"texts": [dataclasses.asdict(calibration) for calibration in request.calibration]}
    return {**about, "sublayers": [dataclasses.asdict(fit) for fit in refitted.fits]}


def _write_json(file: pathlib.Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _print_summary(
    source: Source,
    definition: nn.ModelDef,
    request: Request,
    result: Result | None,
    refitted: Refitted | None,
    *,
    as_json: bool,
) -> None:
    model, parameters = definition.config, sum(math.prod(array.shape) for array in source.arrays.values())
    fits = () if refitted is None else refitted.fits
    if as_json:
        summary = {"source": source.path, "destination": str(request.destination), "format": request.format.value}
        summary |= {"parameters": parameters, "residual": model.residual, "ladder_layers": model.ladder_layers}
        summary |= {"ranks": model.ranks, "sensitivity": None if result is None else result.as_dict()}
        summary |= {"refit": [dataclasses.asdict(fit) for fit in fits]}
        print(json.dumps(summary))
        return
    layers = "" if model.ladder_layers is None else f", ladder layers {model.ladder_layers}"
    print(f"{request.destination}: {parameters:,} parameters, {model.residual}{layers}; read back and compared")
    if inputs := [fit for fit in fits if fit.sublayer in SUBLAYERS]:
        where = f"each sublayer's is in {REFIT}"
        print(f"refitted {len(inputs)} sublayers: the late inputs lacked {_means(inputs)}; {where}")
        if outputs := [fit for fit in fits if fit not in inputs]:
            print(f"behind these inputs, the sublayers' outputs lacked {_means(outputs)}")
    if result is not None:
        picture_file = f" and {MEASURED}.png" if pyplot.installed() else "; its picture needs 'ladder-jax[plot]'"
        print(f"the measurement is in {request.destination}, in {MEASURED}.json{picture_file}")


def _means(fits: Sequence[Fit]) -> str:
    before, after = (statistics.fmean(getattr(fit, name) for fit in fits) for name in ("before", "after"))
    return f"{before:.1%} of the whole ones (mean square), and lack {after:.1%} now"
