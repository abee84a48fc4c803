"""Targets: hardware to compile for on a machine without it, and checks that their compilers are
installed.
"""

import dataclasses
import math
import os
import re
from collections.abc import Sequence

from ladder_jax import python
from ladder_jax.errors import UserError, described, unknown, whole
from ladder_jax.hardware import HARDWARE

ENVIRONMENT = {
    # To compile without the hardware: no query of a TPU's metadata server, no check for a GPU's
    # driver.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: {compute} minor: 0 }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  l2_cache_size: {cache}
  fpus_per_core: 128
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""
"""XLA's GpuTargetConfig of one, to compile on machines without it.

compute: major version of the compute capability; clock: GHz; cache: bytes. HARDWARE has memory and
    bandwidth.
"""
GPUS = {
    "h100": dict(name="NVIDIA H100 80GB HBM3", compute=9, cores=132, clock=1.98, cache=50 * 2**20),
    "b200": dict(name="NVIDIA B200", compute=10, cores=148, clock=1.965, cache=126 * 2**20),
}
KINDS = (*HARDWARE, "cpu")
COMPILERS = {
    "tpu": ("libtpu",),
    "cuda": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "cpu": ("jaxlib",),
}
"""By platform the packages that may hold its compiler; one of them is installed."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A slice of devices of one kind. shape: "2x2x2" chips of a TPU, or the number of GPUs or CPU
    devices.
    """

    kind: str
    shape: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise unknown(
                "target", f"{self.kind}:{self.shape}", [target.name for target in TARGETS]
            )
        flat = self.kind == "cpu" or self.kind in GPUS
        if not re.fullmatch(r"[1-9]\d*" if flat else r"[1-9]\d*(x[1-9]\d*){1,2}", str(self.shape)):
            example = next(target.name for target in TARGETS if target.kind == self.kind)
            raise UserError(
                f"target {self.name!r} has no valid size for {self.kind}: write it as in {example}"
            )

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.shape}"

    @property
    def platform(self) -> str:
        return "cuda" if self.kind in GPUS else "cpu" if self.kind == "cpu" else "tpu"

    @property
    def memory(self) -> int | None:
        """Bytes of one device; None for a CPU."""
        return HARDWARE[self.kind].memory if self.kind in HARDWARE else None

    @property
    def count(self) -> int:
        """Number of jax devices."""
        chips = math.prod(map(int, self.shape.split("x")))
        return chips * (HARDWARE[self.kind].chip if self.kind in HARDWARE else 1)


def parse(name: str) -> Target:
    """Parse `v5p:4x4x4`, `h100:8` or `cpu:8`. The compiler checks a TPU's shape later (see
    `devices`).
    """
    if not isinstance(name, str):
        raise UserError(f"target must be of type str, not {described(name)}")
    kind, _, shape = name.partition(":")
    return Target(kind, shape)


TARGETS = tuple(map(parse, (
    "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "h100:8", "b200:8", "cpu:8",
)))  # fmt: skip
"""The targets that the project's own audits compile for."""


def devices(target: Target) -> Sequence:
    """The target's devices, for compiling only. Raises UserError if this machine cannot compile for
    them.

    Set `schedule.targets.ENVIRONMENT` before you import jax: this function sets it too late if jax
    has initialized already.
    """
    if not isinstance(target, Target):
        raise UserError(f"target must be of type Target, not {described(target)}")
    if reason := not_installed(target):
        raise UserError(f"target {target.name}: {reason}")
    import jax
    from jax.experimental import topologies

    from ladder_jax import parallel

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not parallel.has_accelerator():  # else libtpu says that it cannot tell which one is here
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    local = jax.devices()  # this call also registers jax's plugins
    if target.platform == "cpu":
        if len(local) < int(target.shape) or local[0].platform != "cpu":
            raise UserError(
                f"{target.name} needs JAX_NUM_CPU_DEVICES={target.shape} and JAX_PLATFORMS=cpu"
            )
        return local[: int(target.shape)]
    try:
        if target.platform == "tpu":
            return topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
        published = HARDWARE[target.kind]
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology=_hosts(int(target.shape)),
            target_config=GPU.format(
                bandwidth=int(published.bandwidth),
                memory=published.memory,
                **GPUS[target.kind],
            ),
        )
        return found.devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition(": ")[2] or str(error)
        raise UserError(
            f"the compiler cannot describe target {target.name}: {reason.splitlines()[0]}"
        ) from None


def make_mesh(target: str, *, tensor: int | None = None, data: int = 1):
    """A mesh (data x fsdp x tensor) over a target's first devices, for compiling. tensor: default,
    all / data.
    """
    from ladder_jax import parallel

    target_devices = devices(parse(target))
    if tensor is None:
        tensor = max(1, len(target_devices) // whole("data", data, least=1))
    return parallel.make_mesh(data=data, tensor=tensor, devices=target_devices)


def _hosts(count: int) -> str:
    """XLA's topology of `count` GPUs: slices x hosts x GPUs per host, 8 of them on a host."""
    if count > 8 and count % 8:
        raise UserError(f"{count} GPUs do not fill hosts of 8: use up to 8, or a multiple of 8")
    return f"1x{max(1, count // 8)}x{min(count, 8)}"


def not_installed(target: Target) -> str | None:
    """Which package of the compiler for `target` is missing, and how to install it; None if none.
    Imports no jax.
    """
    if target.platform == "cpu":
        return None
    jax, *found = python.versions("jax", *COMPILERS[target.platform]).values()
    if target.platform == "tpu":
        return None if found else f"libtpu is not installed: pip install 'jax[tpu]=={jax}'"
    if not found:
        plugins = f"jax-cuda13-plugin=={jax} jax-cuda13-pjrt=={jax}"
        return f"the CUDA plugin is not installed: pip install --no-deps {plugins}"
    if found[0] != jax:
        return f"the jax-cuda plugin {found[0]} does not fit jax {jax}: install that version"
    return None
