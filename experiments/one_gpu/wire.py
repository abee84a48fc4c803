"""An emulated wire: what a topology exposes of it on one device, where a real all-reduce needs several.

Every sublayer's all-reduce becomes a copy of the same bytes to the host's pinned memory and back, which a GPU's copy
engines do beside its compute, as they would an all-reduce's transfers. AN EMULATION: its latency and bandwidth are
PCIe's, it takes no SMs, and it waits for no other device.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
from jax import lax

from ladder_jax import decode
from ladder_jax.residual import steps

RANKS = 8  # from two on, topologies keep their all-reduces apart by barriers


@contextlib.contextmanager
def host_wire() -> Iterator[None]:
    """What is traced inside communicates by way of the host; on entry and exit, nothing traced is kept."""
    with mock.patch.multiple(steps, all_reduce=_there_and_back, ranks=lambda axes: RANKS), _traced_anew():
        yield


def _there_and_back(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, by way of the host. Over one rank the sum is `x` itself; it gives the result its type."""
    # Without the barrier XLA takes two moves that cancel out for none.
    there = lax.optimization_barrier(jax.device_put(lax.psum(x, axes), jax.memory.Space.Host))
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
