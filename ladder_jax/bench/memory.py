"""Whether what is asked fits the device's memory: before it is allocated, and again once it is compiled."""

import os
import pathlib
import re

import jax

from ladder_jax.errors import UserError

GIB = 2**30


def room(device: jax.Device, *, devices: int) -> int | None:
    """Bytes for each of `devices` devices like `device`; simulated ones share the machine's. None where unknown."""
    if device.platform == "cpu":
        found = _available()
        return None if found is None else found // devices
    return (device.memory_stats() or {}).get("bytes_limit")


def check(parts: dict[str, float], *, room: int | None, batch: int, what: str) -> None:
    """Raises UserError where the parts (bytes a device, by name) are more than `room` together."""
    if room is None or sum(parts.values()) <= room:
        return
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    raise UserError(
        f"{what} at batch {batch} needs {sum(parts.values()) / GIB:.1f} GiB a device ({listed}), but there are"
        f" {room / GIB:.1f}: ask for a smaller --batch or --prompt-length, fewer --layers, or more --tensor devices"
    )


def _available() -> int | None:
    """Linux's estimate of what can be had without swapping; elsewhere all of the machine's memory."""
    file = pathlib.Path("/proc/meminfo")
    if file.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", file.read_text())):
        return int(found[1]) * 1024
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
