"""Time all-reduces by size and ranks, kernel launches, and compute beside an all-reduce.

A program chains CHAIN operations, so that the host's cost of a call is divided by CHAIN: each operation reads the
previous result. Every program runs a few times before it is timed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ladder_jax import parallel
from ladder_jax.config import Loop, Phase

CHAIN = 32
KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB)
SIMULATED = (4 * KIB, 64 * KIB, MIB)  # smaller: all simulated devices share one memory's bandwidth
KERNELS = (4 * KIB, 32 * KIB, 256 * KIB)  # up to these XLA's all-reduce on NVIDIA GPUs is one-shot
AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Timing:
    """samples: seconds per operation, one sample per run."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range over median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A timed all-reduce of `size` bytes over `ranks` devices."""

    ranks: int
    size: int
    timing: Timing


def all_reduces(
    *,
    ranks: Sequence[int],
    sizes: Sequence[int],
    warmup: int,
    repeats: int,
    advance: Callable[[str], None],
    overlap: parallel.Overlap | None = None,
) -> list[Reduced]:
    """Time an all-reduce of each size over each number of ranks. `advance(label)` is called before each.

    overlap: with the compiler options of a decode step that hides its all-reduces (on NVIDIA GPUs: NCCL's) or waits for
    them (one kernel); None for none.
    """
    reduced = []
    for count in ranks:
        mesh = parallel.make_mesh(tensor=count, devices=jax.devices()[:count])
        for size in sizes:
            advance(f"an all-reduce of {size // KIB} KiB over {count} devices")
            run = _chain_of_all_reduces(mesh, size, overlap=overlap)
            reduced.append(Reduced(count, size, timed(run, of=CHAIN, warmup=warmup, repeats=repeats)))
    return reduced


def launch(*, warmup: int, repeats: int) -> Timing:
    """The time of a minimal kernel: a product of 8 x 8 matrices in a chain, which no compiler fuses."""
    a = jnp.eye(8, dtype=jnp.float32)

    @jax.jit
    def chain(x):
        for _ in range(4 * CHAIN):
            x = a @ x
        return x

    return timed(lambda: chain(a), of=4 * CHAIN, warmup=warmup, repeats=repeats)


def contention(*, ranks: int, warmup: int, repeats: int) -> tuple[float, float] | None:
    """(contention, spread), or None if the device does not compute during an all-reduce.

    Contention c is the relative slowdown of compute. If compute alone takes W and the all-reduce alone A, with W > 2 A,
    both together take W + A c / (1 + c) (`predict.timeline`).
    """
    mesh = parallel.make_mesh(tensor=ranks, devices=jax.devices()[:ranks])
    wire = timed(_beside(mesh, products=0, reduce=True), of=1, warmup=warmup, repeats=repeats)
    products = 8
    while (compute := timed(_beside(mesh, products=products, reduce=False), of=1, warmup=1, repeats=3)).median < (
        3 * wire.median
    ):
        products *= 2
    compute = timed(_beside(mesh, products=products, reduce=False), of=1, warmup=warmup, repeats=repeats)
    both = timed(_beside(mesh, products=products, reduce=True), of=1, warmup=warmup, repeats=repeats)
    lost = max(0.0, (both.median - compute.median) / wire.median)
    if lost > 0.95:
        return None
    return lost / (1 - lost), max(wire.spread, compute.spread, both.spread)


def timed(run: Callable[[], object], *, of: int, warmup: int, repeats: int) -> Timing:
    """Seconds per operation. of: number of operations in a run."""
    for _ in range(warmup):
        jax.block_until_ready(run())
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append((time.perf_counter() - start) / of)
    return Timing(tuple(samples))


def _chain_of_all_reduces(mesh: Mesh, size: int, *, overlap: parallel.Overlap | None = None) -> Callable[[], jax.Array]:
    """A chain of all-reduces. A scale that differs by rank follows each: XLA replaces a sum of equal arrays by a
    product."""
    count = mesh.shape[AXIS]

    def local(x, scale):
        for _ in range(CHAIN):
            x = lax.psum(x, AXIS) * scale
        return x

    traits = overlap and parallel.Traits(overlap, Phase.DECODE, Loop.UNROLLED)
    options = parallel.compile_options(mesh, traits=traits) if traits else None
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=P(AXIS))
    chain = jax.jit(mapped, compiler_options=options)
    place = NamedSharding(mesh, P(AXIS))
    x = jax.device_put(jnp.ones((count, size // 2), jnp.bfloat16), place)
    scale = jax.device_put((jnp.arange(count, dtype=jnp.bfloat16)[:, None] + 1) / count**2, place)
    return lambda: chain(x, scale)


def _beside(mesh: Mesh, *, products: int, reduce: bool) -> Callable[[], object]:
    """A program of matrix products and an independent all-reduce of 16 MiB."""
    count, width = mesh.shape[AXIS], 4096

    def local(x, a, z):
        summed = lax.psum(z, AXIS) if reduce else z
        for _ in range(products):
            x = a @ x
        return x, summed

    out = (P(AXIS), P() if reduce else P(AXIS))
    traits = parallel.Traits(parallel.Overlap.HIDES, Phase.PREFILL, Loop.UNROLLED)
    options = parallel.compile_options(mesh, traits=traits)
    specs = (P(AXIS), P(), P(AXIS))
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out), compiler_options=options)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    x = place(jnp.ones((count * width, 1024), jnp.bfloat16), P(AXIS))
    a = place(jnp.eye(width, dtype=jnp.bfloat16), P())
    z = place(jnp.ones((count, 8 * MIB), jnp.bfloat16), P(AXIS))
    return lambda: program(x, a, z)
