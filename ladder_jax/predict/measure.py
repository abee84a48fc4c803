"""Measure this machine's constants: time copies, matmuls, kernel launches and all-reduces, and fit
the link's.

A program chains CHAIN operations, so that the host's cost of a call is divided by CHAIN: each
operation reads the previous result. Every program runs a few times before it is timed.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from ladder_jax import parallel
from ladder_jax.config import Loop, Phase
from ladder_jax.decode import memory
from ladder_jax.errors import UserError
from ladder_jax.parallel import Overlap, is_v5e
from ladder_jax.predict import machine
from ladder_jax.predict.machine import Halves, Kernel, Link, Ring
from ladder_jax.terminal import progress

WARMUP = 3  # runs before those that are timed
REPEATS = 10
MOST_READ = 8  # ranks: XLA's all-reduce kernels read the memory of so many
CHAIN = 32
KIB = 2**10
MIB = 2**20
SIZES = (4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB)
SIMULATED = (4 * KIB, 64 * KIB, MIB)  # smaller: all simulated devices share one memory's bandwidth
KERNELS = (4 * KIB, 32 * KIB, 256 * KIB)  # up to these XLA's all-reduce on NVIDIA GPUs is one-shot
AXIS = "tensor"
# least ratio of a large all-reduce's time to a small one's; below it the bandwidth cannot be fitted
GROWS = 1.1


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A timed all-reduce of `bytes` bytes over `ranks` devices.

    seconds: the median. spread: the interquartile range over it.
    """

    ranks: int
    bytes: int
    seconds: float
    spread: float


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
        return {
            unit: self.best,
            f"{unit}_min": min(self.rates),
            f"{unit}_median": statistics.median(self.rates),
            f"{unit}_max": self.best,
            "array": self.array,
        }


def constants(tensor: int) -> tuple[dict, list[Reduced]]:
    """The sections of a machine's file, with constants as {value, source}, and the timed
    all-reduces.

    Raises UserError for times that do not grow with the bytes.
    """
    device = jax.devices()[0]
    simulated = device.platform == "cpu"
    gpu = device.platform == "gpu"
    ranks = sorted({size for size in (2, 4, 8, 16, 32, tensor) if 1 < size <= tensor})
    kernel_ranks = [count for count in ranks if gpu and count <= MOST_READ]
    free = memory.free_memory(device, devices=jax.device_count())
    with progress(4) as update:
        update(0, "copying, multiplying")
        copy = copy_bandwidth(device, free=free)
        matmul = matmul_peak(device, dtype="bfloat16")
        update(1, "starting kernels")
        started = launch()
        update(2, "all-reduces")
        reduced = all_reduces(
            ranks=ranks,
            sizes=SIMULATED if simulated else SIZES,
            # NCCL's; XLA's own kernels are measured next
            overlap=Overlap.HIDES if gpu else None,
        )
        update(3, "all-reduces of one kernel")
        kernels = all_reduces(ranks=kernel_ranks, sizes=KERNELS, overlap=Overlap.WAITS)
    of = f"of {REPEATS} runs"
    alike = "v5p" if device.platform == "tpu" else "h100-nvlink"
    rate = "is the measured rate, not a published peak"
    devices = f"measured on {tensor} {'simulated ' if simulated else ''}devices"
    sections: dict = {
        "devices": {"value": tensor, "source": devices},
        "memory": _entry(
            free or 0, "the device's memory, or this machine's free memory divided by its devices"
        ),
        "flops": _entry(matmul.best, f"measured: the best {of}, {matmul.array}"),
        "bandwidth": _entry(copy.best, f"measured: a copy's best {of}, {copy.array}"),
        "flops_share": _entry(1.0, f"flops {rate}"),
        "bandwidth_share": _entry(1.0, f"bandwidth {rate}"),
        "launch": _entry(started, f"measured: the median {of}"),
        "contention": _entry(machine.load(alike).contention, f"assumed as on {alike}"),
    }
    if reduced:
        ring = Ring.TWO_WAY if device.platform == "tpu" else Ring.ONE_WAY
        fitted = fit_link(reduced, ring=ring)
        error = f"off by {fit_error(reduced, fitted):.0%} in the median"
        source = f"fitted to {len(reduced)} all-reduces over up to {tensor} devices, {error}"
        link = _entries(fitted, source)
        link["ring"] = ring.value
        if kernels:
            source = f"fitted to {len(kernels)} all-reduces by XLA's kernel"
            link["one_shot"] = _entries(fit_one_shot(kernels), source)
        if is_v5e(device.device_kind):
            link["halves"] = Halves.NONE.value
        sections["link"] = link
    return sections, reduced


def _entry(value: float, source: str) -> dict:
    """With four significant digits."""
    return {"value": float(f"{value:.4g}"), "source": source}


def _entries(fitted: Link | Kernel, source: str) -> dict[str, Any]:
    """Of its numbers."""
    numbers = {name: value for name, value in vars(fitted).items() if isinstance(value, float)}
    return {name: _entry(value, source) for name, value in numbers.items()}


def copy_bandwidth(device: jax.Device, *, free: int | None) -> Ceiling:
    """Bytes read and written a second by y = ~x; x is uint32 and too large for any cache.

    An H200 does so at a plain copy's rate, and with bfloat16 at 0.78 of it. x is donated because on
    a CPU writing to fresh pages costs ten times the copy.

    free: free bytes of the device; None if unknown.
    """
    cpu = device.platform == "cpu"
    size = (128 if cpu else 1024) * MIB
    size = size if free is None else min(size, free // 8)
    x = jax.device_put(jnp.ones(size // 4, jnp.uint32), device)
    rates = _rates(
        jax.jit(lambda x: ~x, donate_argnums=0),
        x,
        work=2 * size,
        calls=2 if cpu else 10,
    )
    return Ceiling(rates, f"{size / MIB:.0f} MiB of uint32")


def matmul_peak(device: jax.Device, *, dtype: str) -> Ceiling:
    """Floating-point operations a second of x = a x with square matrices of `dtype`."""
    cpu = device.platform == "cpu"
    size = 1024 if cpu else 8192
    # With this standard deviation repeated products neither grow nor vanish.
    a = jax.random.normal(jax.random.key(0), (size, size), dtype) * size**-0.5
    a, x = jax.device_put((a, a + 0), device)
    step = jax.jit(lambda x, a: a @ x, donate_argnums=0)
    rates = _rates(lambda x: step(x, a), x, work=2 * size**3, calls=2 if cpu else 10)
    return Ceiling(rates, f"{size} x {size} of {dtype}")


def all_reduces(
    *, ranks: Sequence[int], sizes: Sequence[int], overlap: Overlap | None = None
) -> list[Reduced]:
    """Time an all-reduce of each size over each number of ranks.

    overlap: with the compiler options of a decode step that hides its all-reduces (on NVIDIA GPUs:
        NCCL's) or waits for them (one kernel); None for none.
    """
    reduced = []
    for count in ranks:
        mesh = parallel.make_mesh(tensor=count, devices=jax.devices()[:count])
        for size in sizes:
            samples = timed(_chain_of_all_reduces(mesh, size, overlap=overlap), of=CHAIN)
            low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
            reduced.append(Reduced(count, size, median, (high - low) / median))
    return reduced


def launch() -> float:
    """The time of a minimal kernel: a product of 8 x 8 matrices in a chain, which no compiler
    fuses.
    """
    a = jnp.eye(8, dtype=jnp.float32)

    @jax.jit
    def chain(x):
        for _ in range(4 * CHAIN):
            x = a @ x
        return x

    return statistics.median(timed(lambda: chain(a), of=4 * CHAIN))


def timed(run: Callable[[], object], *, of: int) -> tuple[float, ...]:
    """Seconds per operation, by run. of: number of operations in a run."""
    for _ in range(WARMUP):
        jax.block_until_ready(run())
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        samples.append((time.perf_counter() - start) / of)
    return tuple(samples)


def _rates(step: Callable, x: jax.Array, *, work: float, calls: int) -> tuple[float, ...]:
    """`work` a second, by sample. A sample queues all its calls, so that the device never waits for
    the host.
    """

    def run() -> jax.Array:
        nonlocal x
        for _ in range(calls):
            x = step(x)
        return x

    return tuple(work / one for one in timed(run, of=calls))


def _chain_of_all_reduces(
    mesh: Mesh, size: int, *, overlap: Overlap | None = None
) -> Callable[[], object]:
    """A chain of all-reduces. A scale that differs by rank follows each: XLA replaces a sum of
    equal arrays by a product.
    """
    count = mesh.shape[AXIS]

    def local(x, scale):
        for _ in range(CHAIN):
            x = lax.psum(x, AXIS) * scale
        return x

    traits = overlap and parallel.Traits(overlap, Phase.DECODE, Loop.UNROLLED)
    options = parallel.compile_options(mesh, traits=traits) if traits else None
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    chain = jax.jit(mapped, compiler_options=options)
    x = jnp.ones((count, size // 2), jnp.bfloat16)
    scale = (jnp.arange(count, dtype=jnp.bfloat16)[:, None] + 1) / count**2
    placed = jax.device_put((x, scale), NamedSharding(mesh, P(AXIS)))
    return lambda: chain(*placed)


def fit_link(measured: Sequence[Reduced], *, ring: Ring) -> Link:
    """Least squares of relative errors with non-negative constants (`Link.times` has the formula).

    With a single number of ranks the steps are part of the fitted latency, and `step` is 0. Raises
    UserError if the times do not grow with the bytes: then something else determined them.
    """
    several = len({one.ranks for one in measured}) > 1
    steps = lambda ranks: 2 * (ranks - 1) if ring is Ring.ONE_WAY else ranks
    rows = [
        (1.0, steps(m.ranks) * several, 2 * (m.ranks - 1) / m.ranks * m.bytes) for m in measured
    ]
    latency, step, per_byte = _non_negative(rows, measured)
    return Link(latency, step, 1 / per_byte, ring=ring)


def fit_one_shot(measured: Sequence[Reduced]) -> Kernel:
    """Likewise of `latency + (n - 1) bytes / bandwidth`."""
    rows = [(1.0, (one.ranks - 1) * one.bytes) for one in measured]
    latency, per_byte = _non_negative(rows, measured)
    return Kernel(latency, 1 / per_byte)


def _non_negative(rows: Sequence[Sequence[float]], measured: Sequence[Reduced]) -> list[float]:
    """The constants by which `rows` come nearest to the measured seconds, of growing sizes; the last
    one's is of a byte.
    """
    from scipy.optimize import nnls

    widest = [one for one in measured if one.ranks == measured[-1].ranks]
    small = widest[0]
    large = widest[-1]
    seconds = np.array([one.seconds for one in measured])
    # Columns are scaled to about 1, because bytes and seconds differ by orders of magnitude; rows
    # are divided by their times, for relative errors.
    scale = np.array(rows).max(axis=0)
    scale[scale == 0] = 1
    solved, _ = nnls(np.array(rows) / scale / seconds[:, None], np.ones(len(rows)))
    constants = np.where(solved > 1e-9 * solved.max(), solved / scale, 0.0)  # less is rounding
    if constants[-1] == 0 or large.seconds < GROWS * small.seconds:
        took = lambda one: f"{one.bytes // KIB} KiB: {one.seconds * 1e6:.0f} µs"
        raise UserError(
            f"all-reduces do not take longer with more bytes ({took(small)}, {took(large)}):"
            " something else keeps this machine busy; wait"
        )
    return constants.tolist()


def fit_error(measured: Sequence[Reduced], fitted: Link) -> float:
    """The median relative error of the fitted link."""
    return statistics.median(
        abs(fitted.all_reduce(m.bytes, ranks=m.ranks) / m.seconds - 1) for m in measured
    )
