"""Hardware that programs can be compiled for without having it, and whether that works here."""

import dataclasses
import importlib.metadata
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from ladder_jax import python
from ladder_jax.errors import UserError, unknown
from ladder_jax.hardware import HARDWARE
from ladder_jax.schedule.gpus import GPUS

ENVIRONMENT = {
    # Compile on a machine without the hardware: no look for a TPU's metadata server, no demand for a driver.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}

KINDS = (*HARDWARE, "cpu")


@dataclasses.dataclass(frozen=True)
class Target:
    """A slice of devices: `kind` and its shape, "2x2x2" chips of a TPU or a number of GPUs or CPU devices."""

    kind: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.shape}"

    @property
    def platform(self) -> str:
        return "cuda" if self.kind in GPUS else "cpu" if self.kind == "cpu" else "tpu"

    @property
    def memory(self) -> int | None:
        """Bytes a device; None for a CPU."""
        return HARDWARE[self.kind].memory if self.kind in HARDWARE else None

    @property
    def count(self) -> int:
        """How many devices jax sees in it."""
        chips = math.prod(map(int, self.shape.split("x")))
        return chips * (HARDWARE[self.kind].chip if self.kind in HARDWARE else 1)


def parse(name: str) -> Target:
    """`v5p:4x4x4`, `h100:8`, `cpu:8`; whether a compiler knows the shape is for it to say (see `devices`)."""
    kind, colon, shape = name.partition(":")
    if kind not in KINDS:
        raise unknown("target", name, [target.name for target in TARGETS])
    flat = kind == "cpu" or kind in GPUS
    if not re.fullmatch(r"[1-9]\d*" if flat else r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        example = next(target.name for target in TARGETS if target.kind == kind)
        raise UserError(f"target {name!r} has no size that {kind} is made in: write it as in {example}")
    return Target(kind, shape)


def devices(target: Target) -> Sequence:
    """The target's devices, to compile for and not to run on. Raises UserError where that cannot be done here.

    Where jax has been imported already, `ENVIRONMENT` should have been set before.
    """
    if reason := not_installed(target):
        raise UserError(f"target {target.name}: {reason}")
    import jax
    from jax.experimental import topologies

    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    here = jax.devices()  # also makes jax find its plugins
    if target.platform == "cpu":
        if len(here) < int(target.shape) or here[0].platform != "cpu":
            raise UserError(f"{target.name} needs JAX_NUM_CPU_DEVICES={target.shape} and JAX_PLATFORMS=cpu")
        return here[: int(target.shape)]
    try:
        if target.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology=_hosts(int(target.shape)),
            target_config=GPUS[target.kind].as_text(HARDWARE[target.kind]),
        ).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise UserError(f"the compiler cannot describe target {target.name}: {reason.splitlines()[0]}") from None


def make_mesh(target: str, *, tensor: int | None = None, data: int = 1):
    """A mesh (data x fsdp x tensor) over a target's first devices, to compile for; tensor: all of them."""
    from ladder_jax import parallel

    found = devices(parse(target))
    size = len(found) // data if tensor is None else tensor
    if data * size > len(found):
        raise UserError(f"{target} has {len(found)} devices, too few for data {data} x tensor {size}")
    return parallel.make_mesh(data=data, tensor=size, devices=found)


def _hosts(count: int) -> str:
    """Slices x hosts x devices a host, eight to a host."""
    if count > 8 and count % 8:
        raise UserError(f"{count} GPUs do not fill hosts of 8: use up to 8, or a multiple of 8")
    return f"1x{max(1, count // 8)}x{min(count, 8)}"


TARGETS = tuple(map(lambda name: Target(*name.split(":")), (
    "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8", "cpu:8",
)))  # fmt: skip
"""The targets that the project's own audits compile for."""


def missing(target: Target) -> str | None:
    """Why `target` cannot be compiled for here and what installs it, or None."""
    reason = not_installed(target)
    return _probe_tpu(target) if reason is None and target.platform == "tpu" else reason


def not_installed(target: Target) -> str | None:
    """Why the compiler for `target` is not here and what installs it, or None; imports no jax."""
    if target.platform == "cpu":
        return None
    jax = _version("jax")
    if target.platform == "tpu":
        return None if _version("libtpu") else f"libtpu is not installed: pip install 'jax[tpu]=={jax}'"
    version = _version("jax-cuda13-plugin") or _version("jax-cuda12-plugin")
    if version is None:
        plugins = f"jax-cuda13-plugin=={jax} jax-cuda13-pjrt=={jax}"
        return f"the CUDA plugin is not installed: pip install --no-deps {plugins}"
    if version != jax:
        return f"the jax-cuda plugin {version} does not fit jax {jax}: install that version"
    return None


def _probe_tpu(target: Target) -> str | None:
    """Ask libtpu itself, in a process of its own: it can be loaded once, and it may abort."""
    done = subprocess.run(
        python.command(f"{__name__}:probe", target.name),
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"libtpu {_version('libtpu')} cannot describe it: {last[:200]}"


def probe() -> None:
    """What `_probe_tpu` starts; the argument is a target's name."""
    from jax.experimental import topologies

    print(len(topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
