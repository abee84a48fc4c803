"""Fit a link's constants to timed all-reduces."""

from collections.abc import Sequence

import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.predict.calibrate.measure import KIB, Reduced
from ladder_jax.predict.link import Kernel, Link, Ring

GROWS = 1.1  # least ratio of a large all-reduce's time to a small one's; below it the bandwidth cannot be fitted


def link(measured: Sequence[Reduced], *, ring: Ring) -> Link:
    """Least squares of relative errors with non-negative constants (`Link.all_reduce` has the formula).

    With a single number of ranks the steps are part of the fitted latency, and `step` is 0. Raises UserError if the
    times do not grow with the bytes: then something else determined them.
    """
    from scipy.optimize import nnls

    several = len({one.ranks for one in measured}) > 1
    steps = lambda ranks: 2 * (ranks - 1) if ring is Ring.ONE_WAY else ranks
    rows = [(1.0, steps(m.ranks) * several, 2 * (m.ranks - 1) / m.ranks * m.size) for m in measured]
    seconds = np.array([one.timing.median for one in measured])
    if not np.all(seconds > 0):
        raise UserError("an all-reduce took no time at all: this machine's clock cannot measure it")
    # Columns are scaled to about 1, because bytes and seconds differ by orders of magnitude; rows are divided by their
    # times, for relative errors.
    scale = np.array(rows).max(axis=0)
    scale[scale == 0] = 1
    solved, _ = nnls(np.array(rows) / scale / seconds[:, None], np.ones(len(rows)))
    latency, step, per_byte = solved / scale
    widest = [one for one in measured if one.ranks == measured[-1].ranks]
    small, large = min(widest, key=lambda one: one.size), max(widest, key=lambda one: one.size)
    if per_byte == 0 or large.timing.median < GROWS * small.timing.median:
        raise UserError(
            f"all-reduces do not take longer with more bytes ({small.size // KIB} KiB:"
            f" {small.timing.median * 1e6:.0f} µs, {large.size // KIB} KiB: {large.timing.median * 1e6:.0f} µs):"
            " something else keeps this machine busy; wait, or ask for more --repeats"
        )
    return Link(latency=float(latency), step=float(step), bandwidth=float(1 / per_byte), ring=ring)


def one_shot(measured: Sequence[Reduced]) -> Kernel:
    """Least squares of relative errors of `latency + (n - 1) bytes / bandwidth`. Raises UserError as `link` does."""
    from scipy.optimize import nnls

    seconds = np.array([one.timing.median for one in measured])
    sent = np.array([(one.ranks - 1) * one.size for one in measured]) / KIB
    solved, _ = nnls(np.stack([np.ones_like(sent), sent], axis=1) / seconds[:, None], np.ones(len(measured)))
    latency, per_kib = solved
    if per_kib == 0:
        raise UserError("one-kernel all-reduces do not take longer with more bytes: wait, or ask for more --repeats")
    return Kernel(latency=float(latency), bandwidth=float(KIB / per_kib))


def error(measured: Sequence[Reduced], fitted: Link) -> float:
    """The median relative error of the fitted link."""
    errors = [abs(fitted.all_reduce(m.size, ranks=m.ranks) / m.timing.median - 1) for m in measured]
    return float(np.median(errors))
