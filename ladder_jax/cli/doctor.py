"""The verb `doctor`: package versions, devices, and the targets that this machine can compile for ahead of time."""

import concurrent.futures
import json
import platform
import sys

from ladder_jax import python, terminal

OPTIONAL = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def run(args: dict) -> None:
    found = examine()
    if args["json"]:
        print(json.dumps(found), flush=True)
    else:
        terminal.show(lines(found))


def examine() -> dict:
    """packages: each package's version, None if it is not installed.
    targets: for each compilation target "ok", or why it cannot be compiled for and how to fix that.
    """
    import jax

    from ladder_jax.parallel.platform import prefer_cpu
    from ladder_jax.schedule import targets

    prefer_cpu()  # before jax looks for devices

    names = (*REQUIRED, *OPTIONAL)
    packages = dict.fromkeys(names) | python.versions(*names)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(targets.missing, targets.TARGETS))
    return {
        "python": platform.python_version(),
        **{name: packages[name] for name in ("jax", "jaxlib", "flax")},
        "system": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        "packages": packages,
        "devices": [device.device_kind for device in jax.devices()],
        "targets": {t.name: reason or "ok" for t, reason in zip(targets.TARGETS, reasons, strict=True)},
    }


def lines(found: dict) -> list[str]:
    devices = found["devices"]
    one = ["          --cpu-devices 8 or JAX_NUM_CPU_DEVICES=8 simulates eight"] if devices == ["cpu"] else []
    return [
        f"python    {found['python']} on {found['system']}",
        *(f"{name:<20} {version or 'not installed'}" for name, version in found["packages"].items()),
        "",
        f"devices   {len(devices)}: {', '.join(sorted(set(devices)))}",
        *one,
        "",
        "compiles ahead of time for",
        *(f"  {name:<12} {reason}" for name, reason in found["targets"].items()),
    ]
