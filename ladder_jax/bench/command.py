"""The verb `bench`: measure, print and write the result."""

import itertools
import platform

from ladder_jax import files, python, terminal
from ladder_jax.bench import request as requests

PACKAGES = ("ladder-jax", "jax", "jaxlib", "flax")
# a CPU's is jaxlib
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


def run(args: dict) -> None:
    """Print the result. An invalid argument raises UserError before anything is measured or
    written.
    """
    files.check_writable("out", args["out"])
    files.check_picture("plot", args["plot"])
    request = requests.make(**{name: args[name] for name in requests.OPTIONS})

    import jax  # after the arguments are checked, because it takes seconds

    from ladder_jax.bench import measure, picture, result
    from ladder_jax.parallel import make_mesh

    request = requests.on_devices(request, count=jax.device_count())
    mesh = make_mesh(tensor=request.tensor)
    with terminal.progress(measure.steps(request)) as update:
        done = itertools.count()
        measurement = measure.measure(
            request, mesh=mesh, advance=lambda label: update(next(done), label)
        )
    device = mesh.devices.flat[0]
    answer = result.Result(
        request=request,
        measurement=measurement,
        device=f"{platform.machine()} CPU" if device.platform == "cpu" else device.device_kind,
        devices=jax.device_count(),
        versions={
            "python": platform.python_version(),
            **python.versions(*PACKAGES, *COMPILERS.get(device.platform, ())),
        },
        platform=device.platform,
    )
    terminal.answer(answer, as_json=args["json"], out=args["out"])
    if args["plot"]:
        picture.plot(answer, file=args["plot"])
