"""The verb `bench`: parse the arguments, measure, print and write the result."""

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
    """Print the result. An invalid argument raises UserError before anything is measured or written."""
    files.check_writable("out", args["out"])
    files.check_picture("plot", args["plot"])
    files.check_apart(out=args["out"], plot=args["plot"])
    numbers = {name: args[name] for name in NUMBERS}
    request = requests.make(
        model=args["model"], residual=args["residual"], batch=args["batch"], interleave=args["interleave"], **numbers
    )

    import jax  # after the arguments are checked, because it takes seconds

    from ladder_jax.bench import measure, picture, result, text
    from ladder_jax.parallel import make_mesh
    from ladder_jax.progress import progress

    request = requests.on_devices(request, count=jax.device_count())
    mesh = make_mesh(tensor=request.tensor)
    with progress(measure.steps(request)) as update:
        done = itertools.count()
        measurement = measure.measure(request, mesh=mesh, advance=lambda label: update(next(done), label))
    device = mesh.devices.flat[0]
    answer = result.Result(
        request=request,
        measurement=measurement,
        device=f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind,
        devices=jax.device_count(),
        versions=versions(device.platform),
        platform=device.platform,
    )
    as_json = json.dumps(answer.as_dict())
    # Printed before it is written: the disk may be full, and repeating the measurement takes long.
    if args["json"]:
        print(as_json, flush=True)
    else:
        terminal.show(text.lines(answer))
    if args["out"]:
        files.write_atomically(args["out"], lambda path: pathlib.Path(path).write_text(as_json + "\n"))
    if args["plot"]:
        picture.plot(answer, file=args["plot"])


def versions(platform_name: str) -> dict[str, str]:
    """Versions by name of Python and of the installed packages that compute on this platform."""
    installed = {"python": platform.python_version()}
    for package in (*PACKAGES, *COMPILERS.get(platform_name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed
