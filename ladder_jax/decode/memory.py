"""Whether weights and caches fit the devices' memory, checked before they are allocated;
out-of-memory errors.
"""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import jax

from ladder_jax.config import Loop, Quantize
from ladder_jax.decode import steps, weights
from ladder_jax.errors import RunFailed, UserError
from ladder_jax.nn import ModelDef

GIB = 2**30
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")
"""In jax's errors; that of a program running on a CPU has the second alone."""
LOWER = (
    "fewer slots (--slots), fewer tokens a slot (--capacity, --context, --max-new-tokens), int8 weights"
    " (--quantize int8) or more tensor ranks (--tensor) need less"
)


def free_memory(device: jax.Device, *, devices: int) -> int | None:
    """Bytes that each of `devices` devices like `device` has, None if unknown; simulated ones share
    the machine's.
    """
    if device.platform == "cpu":
        file = pathlib.Path("/proc/meminfo")
        content = file.read_text() if file.exists() else ""
        if line := re.search(r"MemAvailable:\s+(\d+) kB", content):  # without swapping
            return int(line[1]) * 1024 // devices
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
    return (device.memory_stats() or {}).get("bytes_limit")


def check(parts: dict[str, float], *, free: int | None, what: str, instead: str) -> None:
    """Raises UserError where the parts (bytes a device, by name) sum to more than `free`; `instead`
    is advice.
    """
    total = sum(parts.values())
    if free is None or total <= free:
        return
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    raise UserError(
        f"{what} needs {total / GIB:.1f} GiB a device ({listed}), but there are {free / GIB:.1f}: {instead}"
    )


def check_slots(
    definition: ModelDef,
    *,
    slots: int,
    capacity: int,
    chunk: int,
    loop: Loop,
    quantize: Quantize,
) -> None:
    """Raises UserError where the weights, or they and `slots` rows of `capacity` cached tokens, do
    not fit.

    chunk: positions beyond the capacity, see `steps.positions_for`.
    """
    kept, size = check_weights(definition, loop=loop, quantize=quantize)
    parts = {
        "weights": kept,
        "cache": cache_bytes(definition, rows=slots, capacity=capacity + chunk),
    }
    advice = f"ask for fewer, or shorter ones; {_less(quantize)}"
    check(parts, free=size, what=f"a cache of {slots} x {capacity:,} tokens", instead=advice)


def check_weights(
    definition: ModelDef, *, loop: Loop, quantize: Quantize = Quantize.NONE
) -> tuple[int, int | None]:
    """Raises UserError where `weights.prepare` does not fit; returns the bytes a device that it
    keeps, and `free_memory`.
    """
    kept, most = weights.needed_bytes(definition, loop=loop, quantize=quantize)
    devices = definition.layout.mesh.devices
    size = free_memory(devices.flat[0], devices=devices.size)
    parts = {"weights": kept}
    if most > kept:
        parts["one of them as it is stored"] = most - kept
    check(parts, free=size, what="reading the weights", instead=_less(quantize))
    return kept, size


@contextlib.contextmanager
def explained(what: str, *, instead: str = LOWER) -> Iterator[None]:
    """Raises jax's and Python's out-of-memory errors as a UserError of one line; `instead` is
    advice.
    """
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        if (reason := _exhausted(error)) is None:
            raise
        raise UserError(f"out of memory {what} ({reason}): {instead}") from error


def _exhausted(error):
    """The line of an out-of-memory error, or of one among its causes; None for other errors."""
    while error is not None:
        if isinstance(error, MemoryError):
            return (str(error).strip().splitlines() or ["MemoryError"])[0][:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and OUT_OF_MEMORY.search(str(error)):
            return str(error).strip().splitlines()[0].rstrip(".")[:200]
        error = error.__cause__
    return None


def _less(quantize):
    smaller = "int8 weights (--quantize int8) or " if quantize is Quantize.NONE else ""
    return f"{smaller}more tensor ranks (--tensor) need less a device"


def cache_bytes(definition: ModelDef, *, rows: int, capacity: int) -> int:
    """A device's share of the key/value cache."""
    return weights.shard_bytes(
        steps.abstract_cache(definition, rows=rows, capacity=capacity, loop=Loop.UNROLLED)
    )
