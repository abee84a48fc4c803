"""The verb `doctor`: package versions, devices, and the targets that this machine can compile for
ahead of time.
"""

import json
import platform
import sys
from typing import Any

from ladder_jax import python, terminal
from ladder_jax.errors import error_text

OPTIONAL = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def run(args: dict) -> None:
    report = examine()
    if args["json"]:
        print(json.dumps(report))
    else:
        terminal.show(lines(report))


def examine() -> dict[str, Any]:
    """packages: each package's version, None if it is not installed.
    targets: for each compilation target "ok", or why it cannot be compiled for and how to fix that.
    """
    import jax

    from ladder_jax.parallel import prefer_cpu
    from ladder_jax.schedule import targets

    prefer_cpu()  # before jax looks for devices

    try:
        devices = [device.device_kind for device in jax.devices()]
    except (RuntimeError, AssertionError) as error:  # of JAX_PLATFORMS, or a driver
        devices = []
        terminal.say(f"ladder-jax: jax finds no devices: {error_text(error)}")
    names = (*REQUIRED, *OPTIONAL)
    versions = python.versions(*names)
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        **{name: versions[name] for name in ("jax", "jaxlib", "flax")},
        "packages": {name: versions.get(name) for name in names},
        "devices": devices,
        "targets": {one.name: targets.not_installed(one) or "ok" for one in targets.TARGETS},
    }


def lines(report: dict[str, Any]) -> list[str]:
    devices = report["devices"]
    return [
        f"python    {report['python']} on {report['system']}",
        *(
            f"{name:<20} {version or 'not installed'}"
            for name, version in report["packages"].items()
        ),
        "",
        f"devices   {len(devices)}: {', '.join(sorted(set(devices))) or 'none'}",
        "",
        "compiles ahead of time for",
        *(f"  {name:<12} {reason}" for name, reason in report["targets"].items()),
    ]
