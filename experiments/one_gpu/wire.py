"""How much of an emulated wire each topology exposes on one GPU, where a real all-reduce needs
several.

    python -m experiments.one_gpu.wire --model llama-3-70b --share 8 --batch 1,16 --out wire.json

Every sublayer's all-reduce becomes a copy to the host's pinned memory and back, which a GPU's copy
engines do beside its compute, as they would an all-reduce's transfers. AN EMULATION: its latency
and bandwidth are PCIe's, it takes no SMs, and it waits for no other device.

Steps are timed with the wire, and before and after without, so that drift shows. XLA's flags are
read once a process: XLA_FLAGS=--xla_gpu_enable_command_buffer= is without CUDA graphs, which can
undo an overlap.
"""

import contextlib
import functools
import pathlib
import statistics
import sys
from collections.abc import Iterator
from unittest import mock

import jax
from jax import lax

from experiments import study
from ladder_jax import decode, parallel, residual
from ladder_jax.bench import measure, request as requests
from ladder_jax.bench.measure import Samples
from ladder_jax.bench.request import Request
from ladder_jax.residual import recurrence

NUMBERS = ("prompt-length", "new-tokens", "warmup", "repeats", "layers")
RANKS = 8  # from two on, topologies keep their all-reduces apart by barriers


def main(argv: list[str]) -> int:
    parser = study.parser(__doc__, name="one_gpu.wire")
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--batch", default="1,16")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int, help="as of ladder-jax bench")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = vars(parser.parse_args(argv))
    return study.ended(functools.partial(expose, **args), name="wire")


def expose(*, out: pathlib.Path, **asked) -> None:
    request = requests.make(residual="standard,ladder,parallel", **asked)
    about = {"model": request.model, "share": request.share}
    study.keep({**study.environment(), **about, "rows": rows(request)}, file=out)


def rows(request: Request) -> list[dict]:
    """A row a batch and residual. Without the wire is measured before and after, so that drift
    shows.
    """
    mesh = parallel.make_mesh()
    before = measure.samples(request, mesh=mesh)
    with host_wire():
        wired = measure.samples(request, mesh=mesh)
    after = measure.samples(request, mesh=mesh)
    return [row(request, *each) for each in zip(before, wired, after, strict=True)]


def row(request: Request, before: Samples, wired: Samples, after: Samples) -> dict:
    """Seconds an all-reduce in prefill and in a decode step: what the wire adds to the step, over
    its all-reduces.

    drift: the same of the two measurements without the wire, apart from each other; what is smaller
        says nothing.
    """
    topology = residual.of_model(request.config(before.variant.residual))
    count = sum(len(layer) for layer in topology.layers)
    steps = request.new_tokens - 1
    found = {"residual": before.variant.residual, "batch": before.batch, "all_reduces": count}
    for phase, calls in (("prefill", count), ("decode", count * steps)):
        first, with_wire, last = (
            statistics.median(getattr(one, phase)) for one in (before, wired, after)
        )
        without = (first + last) / 2
        found |= {
            f"{phase}_seconds": without,
            f"{phase}_seconds_wired": with_wire,
            f"{phase}_exposed_seconds": (with_wire - without) / calls,
            f"{phase}_drift_seconds": abs(last - first) / calls,
        }
    return found


# The wire.


@contextlib.contextmanager
def host_wire() -> Iterator[None]:
    """What is traced inside communicates by way of the host; on entry and exit, nothing traced is
    kept.
    """
    with mock.patch.multiple(recurrence, all_reduce=_there_and_back, ranks=lambda axes: RANKS):
        _forget()
        try:
            yield
        finally:
            _forget()


def _there_and_back(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, by way of the host. Over one rank the sum is `x` itself; it gives the result its
    type.
    """
    # Without the barrier XLA takes two moves that cancel out for none.
    there = lax.optimization_barrier(jax.device_put(lax.psum(x, axes), jax.memory.Space.Host))
    return jax.device_put(there, jax.memory.Space.Device)


def _forget() -> None:
    for kept in (decode.prefill, decode.decode_many):
        kept.cache_clear()
    jax.clear_caches()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
