"""Hardware that programs can be compiled for without having it, and whether that works here."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """A topology that a compiler knows, by the name that libtpu gives it where it is a TPU's."""

    name: str
    platform: str  # tpu, cuda or cpu


TARGETS = tuple(
    Target(name, platform)
    for platform, names in {
        "tpu": ("v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"),
        "cuda": ("h100:8", "b200:8"),
        "cpu": ("cpu:8",),
    }.items()
    for name in names
)

ENVIRONMENT = {
    # Compile on a machine without the hardware: no look for a TPU's metadata server, no demand for a driver.
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def missing(target: Target) -> str | None:
    """Why `target` cannot be compiled for here and what installs it, or None."""
    if target.platform == "cpu":
        return None
    if target.platform == "tpu":
        if _version("libtpu") is None:
            return f"libtpu is not installed: pip install 'jax[tpu]=={jax.__version__}'"
        return _probe_tpu(target)
    version = _version("jax-cuda13-plugin") or _version("jax-cuda12-plugin")
    if version is None:
        plugins = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
        return f"the CUDA plugin is not installed: pip install --no-deps {plugins}"
    if version != jax.__version__:
        return f"jax-cuda plugin {version} does not match jax {jax.__version__}: install the same version"
    return None


def _probe_tpu(target: Target) -> str | None:
    """Ask libtpu itself, in a process of its own: it can be loaded once, and it may abort."""
    code = (
        "from jax.experimental import topologies as t;"
        f"print(len(t.get_topology_desc(platform='tpu', topology_name={target.name!r}).devices))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return f"libtpu {_version('libtpu')} cannot describe it: {last[:200]}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
