"""An emulated wire: what a topology exposes of it on one device, where a real all-reduce needs several.

Every sublayer's all-reduce becomes a copy to the host's pinned memory and back, which a GPU's copy engines do beside
its compute, as they would an all-reduce's transfers: of the same bytes, or of as many as take an all-reduce's time. AN
EMULATION: its latency and bandwidth are PCIe's, it takes no SMs, and it waits for no other device.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ladder_jax import decode
from ladder_jax.residual import recurrence

RANKS = 8  # from two on, topologies keep their all-reduces apart by barriers
SIZES = tuple(2**power for power in range(10, 23, 2))  # bytes of the copies that are timed

Copied = Callable[[int], int]  # from an all-reduce's bytes to those that are copied in its place


@contextlib.contextmanager
def host_wire(copied: Copied = lambda size: size) -> Iterator[None]:
    """What is traced inside communicates by way of the host; on entry and exit, nothing traced is kept."""
    all_reduce = functools.partial(_there_and_back, copied=copied)
    with mock.patch.multiple(recurrence, all_reduce=all_reduce, ranks=lambda axes: RANKS), _traced_anew():
        yield


def copies(sizes: Sequence[int] = SIZES, *, count: int = 100, repeats: int = 5) -> list[tuple[int, float]]:
    """(bytes, median seconds) of a copy there and back, one after another, by size; neither falls with the other."""

    @jax.jit
    def run(x):
        return lax.fori_loop(0, count, lambda _, x: _by_host(x), x)

    found = []
    for size in sizes:
        x = jnp.zeros(size, jnp.int8)
        samples = [_seconds(run, x) for _ in range(repeats + 1)][1:]
        found.append((size, max([statistics.median(samples) / count, *(seconds for _, seconds in found)])))
    return found


def as_long_as(cost: Callable[[int], float], *, measured: Sequence[tuple[int, float]]) -> Copied:
    """Copies that take `cost(bytes)` seconds, by the `copies` that were timed; at most the largest of them."""
    sizes, seconds = zip(*measured, strict=True)
    return lambda size: int(np.interp(cost(size), seconds, sizes))


def _seconds(run: Callable, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - start


def _there_and_back(x: jax.Array, axes: tuple[str, ...], *, copied: Copied) -> jax.Array:
    """`x`, by way of the host: repeated if more bytes are copied than it has, else the first part of it.

    Over one rank the sum is `x` itself; it gives the result its type.
    """
    whole, count = lax.psum(x, axes), max(1, copied(x.nbytes) // x.itemsize)
    if count == x.size:
        return _by_host(whole)
    flat = whole.reshape(-1)
    sent = jnp.tile(flat, -(-count // x.size))[:count]
    return jnp.concatenate([_by_host(sent)[: x.size], flat[count:]]).reshape(x.shape)


def _by_host(x: jax.Array) -> jax.Array:
    # Without the barrier XLA takes two moves that cancel out for none.
    there = lax.optimization_barrier(jax.device_put(x, jax.memory.Space.Host))
    return jax.device_put(there, jax.memory.Space.Device)


@contextlib.contextmanager
def _traced_anew() -> Iterator[None]:
    try:
        _forget()
        yield
    finally:
        _forget()


def _forget() -> None:
    for kept in (decode.prefill, decode.decode_many):
        kept.cache_clear()
    jax.clear_caches()
