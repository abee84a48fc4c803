"""This machine's constants, each with its source, in the form that `predict.machine` reads."""

import itertools
import math
from collections.abc import Sequence

import jax

from ladder_jax.decode import memory
from ladder_jax.errors import UserError
from ladder_jax.parallel import Overlap, is_v5e
from ladder_jax.predict import machine
from ladder_jax.predict.calibrate import fit, measure
from ladder_jax.predict.calibrate.measure import Reduced
from ladder_jax.predict.link import Halves, Link, Ring
from ladder_jax.progress import progress
from ladder_jax.schedule import roofline

ASSUMED = "h100-nvlink"  # the machine whose contention is taken if none can be measured
MOST_READ = 8  # ranks: XLA's all-reduce kernels read the memory of so many


def constants(tensor: int, *, warmup: int, repeats: int) -> tuple[dict, list[dict]]:
    """The sections of a machine's file with constants as (value, source), and the timed all-reduces.

    Raises UserError for an impossible result: a rate that is not finite, times that do not grow with the bytes.
    """
    device = jax.devices()[0]
    simulated = device.platform == "cpu"
    ranks = [size for size in (2, 4, 8, 16, 32) if size < tensor] + [tensor] if tensor > 1 else []
    sizes = measure.SIMULATED if simulated else measure.SIZES
    timing = dict(warmup=warmup, repeats=repeats)
    room = memory.room(device, devices=jax.device_count())
    done = itertools.count()  # the number of finished measurements
    kernel_ranks = [count for count in ranks if count <= MOST_READ] if device.platform == "gpu" else []
    with progress(4 + len(ranks) * len(sizes) + len(kernel_ranks) * len(measure.KERNELS)) as update:
        advance = lambda what: update(next(done), what)
        advance("copying")
        copy = roofline.copy_bandwidth(device, room=room, samples=repeats)
        advance("multiplying")
        matmul = roofline.matmul_peak(device, dtype="bfloat16", samples=repeats)
        advance("starting kernels")
        launch = measure.launch(**timing)
        hides = Overlap.HIDES if device.platform == "gpu" else None  # NCCL's; XLA's own kernels are measured next
        reduced = measure.all_reduces(ranks=ranks, sizes=sizes, advance=advance, overlap=hides, **timing)
        kernels = measure.all_reduces(
            ranks=kernel_ranks, sizes=measure.KERNELS, advance=advance, overlap=Overlap.WAITS, **timing
        )
        advance("computing beside an all-reduce")
        # A CPU's collectives never run beside compute, so there is nothing to measure.
        beside = None if simulated or tensor == 1 else measure.contention(ranks=tensor, **timing)
    of = f"of {repeats} runs"
    sections: dict = {
        "devices": (tensor, f"measured on {tensor} {'simulated ' if simulated else ''}devices"),
        "memory": (room or 0, "the device's memory, or this machine's free memory divided by its devices"),
        "flops": (matmul.best, f"measured: the best {of}, {matmul.array}, spread {_spread(matmul.rates)}"),
        "bandwidth": (copy.best, f"measured: a copy's best {of}, {copy.array}, spread {_spread(copy.rates)}"),
        "flops_share": (1.0, "flops is the measured rate, not a published peak"),
        "bandwidth_share": (1.0, "bandwidth is the measured rate, not a published peak"),
        "launch": (launch.median, f"measured: the median {of}, spread {launch.spread:.0%}"),
        "contention": _contention(beside, tensor, of),
    }
    for name in ("memory", "flops", "bandwidth", "launch"):
        if not (math.isfinite(sections[name][0]) and sections[name][0] > 0):
            raise UserError(f"{name} could not be measured on this machine (the result is {sections[name][0]})")
    if not reduced:
        return {**sections, "link": None}, []
    fitted = fit.link(reduced, ring=Ring.TWO_WAY if device.platform == "tpu" else Ring.ONE_WAY)
    worst = max(one.timing.spread for one in reduced)
    source = (
        f"fitted to {len(reduced)} all-reduces of {sizes[0] // 1024} KiB to {sizes[-1] // 1024} KiB over"
        f" {', '.join(map(str, ranks))} devices, medians {of}, spread up to {worst:.0%},"
        f" off by {fit.error(reduced, fitted):.0%} in the median"
    )
    sections["link"] = {**_link(fitted, source), **_one_shot(kernels, of)}
    if is_v5e(device.device_kind):
        sections["link"]["halves"] = Halves.NONE.value
    samples = [
        {"ranks": one.ranks, "bytes": one.size, "seconds": one.timing.median, "spread": one.timing.spread}
        for one in reduced
    ]
    return sections, samples


def _contention(beside: tuple[float, float] | None, tensor: int, of: str) -> tuple[float, str]:
    if tensor == 1:
        return 0.0, "one device communicates nothing"
    if beside is None:
        value = machine.load(ASSUMED).contention
        return value, f"assumed as on {ASSUMED}: here nothing ran beside an all-reduce"
    return beside[0], f"measured: medians {of}, spread {beside[1]:.0%}"


def _link(fitted: Link, source: str) -> dict:
    values = {name: (getattr(fitted, name), source) for name in ("latency", "step", "bandwidth")}
    return {**values, "ring": fitted.ring.value}


def _one_shot(kernels: Sequence[Reduced], of: str) -> dict:
    """The link's section of that name; empty where XLA has no such kernels."""
    if not kernels:
        return {}
    fitted = fit.one_shot(kernels)
    source = f"fitted to {len(kernels)} all-reduces by XLA's kernel of 4 KiB to 256 KiB, medians {of}"
    return {"one_shot": {name: (getattr(fitted, name), source) for name in ("latency", "bandwidth")}}


def _spread(rates: tuple[float, ...]) -> str:
    return f"{(max(rates) - min(rates)) / max(rates):.0%}" if max(rates) else "unknown"
