"""From timed all-reduces to a link's constants."""

from collections.abc import Sequence

import numpy as np

from ladder_jax.errors import UserError
from ladder_jax.predict.calibrate.measure import KIB, Reduced
from ladder_jax.predict.link import Link, Ring

GROWS = 1.1  # a large all-reduce lasts at least so many times as long as a small one, or its bytes were not measured


def link(measured: Sequence[Reduced], *, ring: Ring) -> Link:
    """Least squares of relative errors, no constant below zero (`Link.all_reduce` has the formula).

    With one number of ranks the steps cannot be told from the latency, which then holds them. Raises UserError where
    the times do not grow with the bytes: then something else was measured.
    """
    from scipy.optimize import nnls

    several = len({one.ranks for one in measured}) > 1
    steps = lambda ranks: 2 * (ranks - 1) if ring is Ring.ONE_WAY else ranks
    rows = [(1.0, steps(m.ranks) * several, 2 * (m.ranks - 1) / m.ranks * m.size) for m in measured]
    seconds = np.array([one.timing.median for one in measured])
    if not np.all(seconds > 0):
        raise UserError("an all-reduce took no time at all: this machine's clock cannot measure it")
    # Columns are scaled to about 1, so that bytes and seconds weigh alike; then each row by its own time.
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


def error(measured: Sequence[Reduced], fitted: Link) -> float:
    """The median of relative errors of the fitted link."""
    found = [abs(fitted.all_reduce(m.size, ranks=m.ranks) / m.timing.median - 1) for m in measured]
    return float(np.median(found))
