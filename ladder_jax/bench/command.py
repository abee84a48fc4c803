"""The verb `bench`: words to a request, a measurement, an answer."""

import contextlib
import importlib.metadata
import itertools
import json
import pathlib
import platform

from ladder_jax import files, terminal
from ladder_jax.bench import request as requests

NUMBERS = ("prompt_length", "new_tokens", "tensor", "warmup", "repeats", "layers", "share")
PACKAGES = ("ladder-jax", "jax", "jaxlib", "flax")
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}  # a CPU's is jaxlib


def run(args: dict) -> None:
    """Print the answer; raises UserError for what cannot be asked, before anything is measured or written."""
    files.check_writable("out", args["out"])
    files.check_picture("plot", args["plot"])
    files.check_apart(out=args["out"], plot=args["plot"])
    numbers = {name: args[name] for name in NUMBERS}
    request = requests.make(model=args["model"], residual=args["residual"], batch=args["batch"], **numbers)

    import jax  # only now: mistakes are answered at once

    from ladder_jax.bench import measure, picture, result, text
    from ladder_jax.parallel import make_mesh
    from ladder_jax.progress import progress

    request = requests.on_devices(request, count=jax.device_count())
    mesh = make_mesh(tensor=request.tensor)
    with progress(measure.steps(request)) as update:
        done = itertools.count()
        measured = measure.measure(request, mesh=mesh, advance=lambda what: update(next(done), what))
    device = mesh.devices.flat[0]
    answer = result.Result(
        request=request,
        measured=measured,
        device=f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind,
        devices=jax.device_count(),
        versions=versions(device.platform),
        platform=device.platform,
    )
    as_json = json.dumps(answer.as_dict())
    # Printed first: a measurement takes long, and a disk may be full.
    if args["json"]:
        print(as_json, flush=True)
    else:
        terminal.show(text.lines(answer))
    if args["out"]:
        files.write_atomically(args["out"], lambda path: pathlib.Path(path).write_text(as_json + "\n"))
    if args["plot"]:
        picture.plot(answer, file=args["plot"])


def versions(platform_name: str) -> dict[str, str]:
    """What computes on such a platform, by name; only what is installed."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *COMPILERS.get(platform_name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
