"""The verb `doctor`: package versions, devices, and the targets that this machine can compile for
ahead of time.
"""

import concurrent.futures
import dataclasses
import platform
import sys

from ladder_jax import python, terminal
from ladder_jax.errors import error_text

OPTIONAL = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")
REQUIRED = ("jax", "jaxlib", "flax", "optax", "tensorstore", "grain", "numpy")


@dataclasses.dataclass(frozen=True)
class Report:
    """packages: each package's version, None if it is not installed.
    targets: for each compilation target "ok", or why it cannot be compiled for and how to fix that.
    """

    python: str
    system: str
    packages: dict[str, str | None]
    devices: list[str]
    targets: dict[str, str]

    def as_dict(self) -> dict:
        top = {name: self.packages[name] for name in ("jax", "jaxlib", "flax")}
        return {"python": self.python, **top, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        one = (
            ["          --cpu-devices 8 or JAX_NUM_CPU_DEVICES=8 simulates eight"]
            if self.devices == ["cpu"]
            else []
        )
        return [
            f"python    {self.python} on {self.system}",
            *(
                f"{name:<20} {version or 'not installed'}"
                for name, version in self.packages.items()
            ),
            "",
            f"devices   {len(self.devices)}: {', '.join(sorted(set(self.devices))) or 'none'}",
            *one,
            "",
            "compiles ahead of time for",
            *(f"  {name:<12} {reason}" for name, reason in self.targets.items()),
        ]


def run(args: dict) -> None:
    terminal.answer(examine(), as_json=args["json"])


def examine() -> Report:
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
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(targets.missing, targets.TARGETS))
    return Report(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        packages=dict.fromkeys(names) | python.versions(*names),
        devices=devices,
        targets={
            t.name: reason or "ok" for t, reason in zip(targets.TARGETS, reasons, strict=True)
        },
    )
