"""The CPU where there is nothing else: chosen before jax looks, whose plugins for TPUs and GPUs
complain at length.
"""

import glob
from importlib.metadata import entry_points

import jax

FILES = (
    "/dev/nvidia*",
    "/dev/nvhost*",
    "/dev/nvgpu*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/accel*",
    "/dev/vfio/[0-9]*",
)
"""What NVIDIA's, AMD's and TPUs' drivers make; `dxg` is that of a GPU in Windows' Linux."""


def prefer_cpu() -> None:
    """Set jax's platform to the CPU, as jax itself would after its plugins' complaints.

    Nothing changes where the user named a platform, where the machine has an accelerator, or where
    a plugin for any other hardware is installed.
    """
    if not jax.config.jax_platforms and not has_accelerator():
        jax.config.update("jax_platforms", "cpu")


def has_accelerator() -> bool:
    """Whether this machine may have an accelerator, by its drivers' files and the plugins of jax.
    Starts neither.
    """
    others = [
        plugin
        for plugin in entry_points(group="jax_plugins")
        if not plugin.name.startswith("xla_cuda")
    ]
    return bool(others) or any(glob.glob(pattern) for pattern in FILES)
