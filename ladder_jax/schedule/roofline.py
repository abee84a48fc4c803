"""Measure a device's limits: the bandwidth of a plain copy, and the rate of one large matmul."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """A measured limit: the best of its samples.

    rates: one per sample, in bytes or FLOPs a second. array: description of the operand.
    """

    rates: tuple[float, ...]
    array: str

    @property
    def best(self) -> float:
        return max(self.rates)

    def as_dict(self, unit: str) -> dict:
        spread = {
            "min": min(self.rates),
            "median": statistics.median(self.rates),
            "max": max(self.rates),
        }
        return {
            unit: self.best,
            **{f"{unit}_{k}": v for k, v in spread.items()},
            "array": self.array,
        }


def copy_bandwidth(device: jax.Device, *, room: int | None, samples: int = 10) -> Ceiling:
    """Bytes read and written a second by y = ~x; x is uint32 and too large for any cache.

    An H200 does so at a plain copy's rate, and with bfloat16 at 0.78 of it. x is donated because on
    a CPU writing to fresh pages costs ten times the copy.

    room: free bytes of the device; None if unknown.
    """
    cpu = device.platform == "cpu"
    size = (128 if cpu else 1024) * MIB
    size = size if room is None else min(size, room // 8)
    x = jax.device_put(jnp.ones(size // 4, jnp.uint32), device)
    rates = _rates(
        jax.jit(lambda x: ~x, donate_argnums=0),
        x,
        work=2 * size,
        calls=2 if cpu else 10,
        samples=samples,
    )
    return Ceiling(rates, f"{size / MIB:.0f} MiB of uint32")


def matmul_peak(device: jax.Device, *, dtype: str, samples: int = 10) -> Ceiling:
    """Floating-point operations a second of x = a x with square matrices of `dtype`."""
    cpu = device.platform == "cpu"
    size = 1024 if cpu else 8192
    # With this standard deviation repeated products neither grow nor vanish.
    a = jax.random.normal(jax.random.key(0), (size, size), dtype) * size**-0.5
    a, x = jax.device_put((a, a + 0), device)
    step = jax.jit(lambda x, a: a @ x, donate_argnums=0)
    rates = _rates(
        lambda x: step(x, a), x, work=2 * size**3, calls=2 if cpu else 10, samples=samples
    )
    return Ceiling(rates, f"{size} x {size} of {dtype}")


def _rates(
    step: Callable, x: jax.Array, *, work: float, calls: int, samples: int
) -> tuple[float, ...]:
    """`work` a second, by sample. A sample queues all its calls, so that the device never waits for
    the host.
    """
    x, rates = jax.block_until_ready(step(x)), []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            x = step(x)
        jax.block_until_ready(x)
        rates.append(calls * work / (time.perf_counter() - start))
    return tuple(rates)
