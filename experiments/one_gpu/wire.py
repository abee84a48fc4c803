"""How much of an emulated wire each topology exposes on one GPU, where a real all-reduce needs several.

    python -m experiments.one_gpu.wire --model llama-3-70b --share 8 --batch 1,16 --out wire.json

Every sublayer's all-reduce becomes a copy to the host's pinned memory and back, which a GPU's copy engines do beside
its compute, as they would an all-reduce's transfers. AN EMULATION: its latency and bandwidth are PCIe's, it takes no
SMs, and it waits for no other device.

Three wires: `payload` copies an all-reduce's bytes; `nccl` and `one-kernel` copy as many as take the time of NCCL's
all-reduce and of the one-kernel ones, which are the costs that `ladder-jax predict --hardware` has for those bytes.
Steps are timed with a wire, and before and after without, so that drift shows. XLA's flags are read once a process:
XLA_FLAGS=--xla_gpu_enable_command_buffer= is without CUDA graphs, which can undo an overlap.
"""

import contextlib
import functools
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments import study
from ladder_jax import decode, parallel, residual
from ladder_jax.bench import measure
from ladder_jax.bench import request as requests
from ladder_jax.bench.measure import Samples
from ladder_jax.bench.request import Request
from ladder_jax.errors import unknown
from ladder_jax.predict import machine
from ladder_jax.residual import recurrence
from ladder_jax.words import words

KERNELS = (machine.Algorithm.ONE_SHOT, machine.Algorithm.TWO_SHOT)
WIRES = ("payload", "nccl", "one-kernel")
HARDWARE = "h100-nvlink"  # of ladder-jax predict, for the costs of all-reduces
NUMBERS = ("prompt-length", "new-tokens", "warmup", "repeats", "layers")
RANKS = 8  # from two on, topologies keep their all-reduces apart by barriers
SIZES = tuple(2**power for power in range(10, 23, 2))  # bytes of the copies that are timed

Copied = Callable[[int], int]  # from an all-reduce's bytes to those that are copied in its place


def main(argv: list[str]) -> int:
    parser = study.parser(__doc__, name="one_gpu.wire")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--batch", default="1,16")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int, help="as of ladder-jax bench")
    parser.add_argument("--wires", default=",".join(WIRES))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = vars(parser.parse_args(argv))
    return study.ended(functools.partial(expose, **args), name="wire")


def expose(*, out: pathlib.Path, wires: str, **asked) -> None:
    names, request = words("wires", wires), requests.make(residual="standard,ladder,parallel", **asked)
    for name in names:
        if name not in WIRES:
            raise unknown("wire", name, WIRES)
    measured = copies()
    every = emulated(ranks=request.share, measured=measured)
    found = {
        **study.environment(),
        "model": request.model,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "share": request.share,
        "hardware": HARDWARE,
        "copies": [{"bytes": size, "seconds": seconds} for size, seconds in measured],
        "rows": rows(request, wires={name: every[name] for name in names}),
    }
    study.keep(found, file=out)


def emulated(*, ranks: int, measured: Sequence[tuple[int, float]]) -> dict[str, Copied]:
    """By name, how many bytes are copied in place of an all-reduce over `ranks`."""
    on = machine.load(HARDWARE)
    cost = lambda among: lambda size: on.all_reduce(size, ranks=ranks, among=among)
    others = [as_long_as(cost(among), measured=measured) for among in (machine.NCCL, KERNELS)]
    return dict(zip(WIRES, (lambda size: size, *others), strict=True))


def rows(request: Request, *, wires: dict[str, Copied]) -> list[dict]:
    """A row a wire, batch and residual. Without a wire is measured before and after, so that drift shows."""
    mesh = parallel.make_mesh()
    once = lambda: measure.samples(request, mesh=mesh)
    before, wired = once(), {}
    for name, copied in wires.items():
        with host_wire(copied):
            wired[name] = once()
    after = once()
    found = []
    for name, samples in wired.items():
        of_wire = [row(request, *each) for each in zip(before, samples, after, strict=True)]
        found += [{"wire": name, **one, **hidden(one, of_wire)} for one in of_wire]
    return found


def row(request: Request, before: Samples, wired: Samples, after: Samples) -> dict:
    """Seconds an all-reduce in prefill and in a decode step: what the wire adds to the step, over its all-reduces.

    drift: the same of the two measurements without the wire, apart from each other; what is smaller says nothing.
    """
    topology = residual.of_model(request.config(before.residual))
    count = sum(len(layer) for layer in topology.layers)
    steps = request.new_tokens - 1
    found = {"residual": before.residual, "batch": before.batch, "all_reduces": count}
    for phase, calls in (("prefill", count), ("decode", count * steps)):
        first, with_wire, last = (statistics.median(getattr(one, phase)) for one in (before, wired, after))
        without = (first + last) / 2
        found |= {
            f"{phase}_seconds": without,
            f"{phase}_seconds_wired": with_wire,
            f"{phase}_exposed_seconds": (with_wire - without) / calls,
            f"{phase}_drift_seconds": abs(last - first) / calls,
        }
    return found


def hidden(row: dict, rows: Sequence[dict]) -> dict:
    """The share of the wire that a row hides: what it exposes of an all-reduce, against what Standard does."""
    [standard] = (one for one in rows if (one["residual"], one["batch"]) == ("standard", row["batch"]))
    names = {phase: f"{phase}_exposed_seconds" for phase in ("prefill", "decode")}
    return {f"{phase}_hidden": 1 - row[name] / standard[name] for phase, name in names.items()}


# The wire.


@contextlib.contextmanager
def host_wire(copied: Copied = lambda size: size) -> Iterator[None]:
    """What is traced inside communicates by way of the host; on entry and exit, nothing traced is kept."""
    all_reduce = functools.partial(_there_and_back, copied=copied)
    with mock.patch.multiple(recurrence, all_reduce=all_reduce, ranks=lambda axes: RANKS):
        _forget()
        try:
            yield
        finally:
            _forget()


def copies(sizes: Sequence[int] = SIZES, *, count: int = 100, repeats: int = 5) -> list[tuple[int, float]]:
    """(bytes, median seconds) of a copy there and back, one after another, by size; neither falls with the other."""

    @jax.jit
    def run(x):
        return lax.fori_loop(0, count, lambda _, x: _by_host(x), x)

    found = []
    for size in sizes:
        x = jnp.zeros(size, jnp.int8)
        samples = [study.seconds(lambda: run(x)) for _ in range(repeats + 1)][1:]
        found.append((size, max([statistics.median(samples) / count, *(seconds for _, seconds in found)])))
    return found


def as_long_as(cost: Callable[[int], float], *, measured: Sequence[tuple[int, float]]) -> Copied:
    """Copies that take `cost(bytes)` seconds, by the `copies` that were timed; at most the largest of them."""
    sizes, seconds = zip(*measured, strict=True)
    return lambda size: int(np.interp(cost(size), seconds, sizes))


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


def _forget() -> None:
    for kept in (decode.prefill, decode.decode_many):
        kept.cache_clear()
    jax.clear_caches()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
