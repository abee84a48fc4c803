"""Whether what is asked fits the device's memory: before it is allocated, and again once it is compiled."""

import math
import os
import pathlib
import re
from typing import Any

import jax

from ladder_jax.config import Loop, Quantize
from ladder_jax.decode import cache, weights
from ladder_jax.errors import UserError
from ladder_jax.nn import Definition

GIB = 2**30


def room(device: jax.Device, *, devices: int) -> int | None:
    """Bytes for each of `devices` devices like `device`; simulated ones share the machine's. None where unknown."""
    if device.platform == "cpu":
        found = _available()
        return None if found is None else found // devices
    return (device.memory_stats() or {}).get("bytes_limit")


def check(parts: dict[str, float], *, room: int | None, what: str, instead: str) -> None:
    """Raises UserError where the parts (bytes a device, by name) are more than `room` together; `instead` is advice."""
    if room is None or sum(parts.values()) <= room:
        return
    total, listed = sum(parts.values()), ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    raise UserError(
        f"{what} needs {total / GIB:.1f} GiB a device ({listed}), but there are {room / GIB:.1f}: {instead}"
    )


def check_slots(definition: Definition, *, slots: int, positions: int, loop: Loop, quantize: Quantize) -> None:
    """Raises UserError where the weights and so many rows of so many cached positions do not fit."""
    devices = definition.layout.mesh.devices
    if slots * positions >= 2**31:  # no shape may be larger, nor need it: it would not fit either
        raise UserError(f"{slots} slots of {positions:,} tokens are too many: ask for fewer, or shorter ones")
    parts = {
        "weights": shard_bytes(weights.abstract(definition, loop=loop, quantize=quantize)),
        "cache": cache_bytes(definition, rows=slots, capacity=positions),
    }
    size = room(devices.flat[0], devices=devices.size)
    check(parts, room=size, what=f"a cache of {slots} x {positions:,} tokens", instead="ask for fewer, or shorter ones")


def cache_bytes(definition: Definition, *, rows: int, capacity: int) -> int:
    """A device's share of the key/value cache."""
    return shard_bytes(cache.abstract(definition, rows=rows, capacity=capacity, loop=Loop.UNROLLED))


def shard_bytes(tree: Any) -> int:
    """A device's share of arrays, from their shapes, dtypes and shardings."""
    return sum(shard_size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def shard_size(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _available() -> int | None:
    """Linux's estimate of what can be had without swapping; elsewhere all of the machine's memory."""
    file = pathlib.Path("/proc/meminfo")
    if file.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", file.read_text())):
        return int(found[1]) * 1024
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
