"""Recommend a topology, with a reason: among those about as fast as the fastest, the one closest to Standard."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from ladder_jax.config import parse_residual
from ladder_jax.predict.model import Speed

WORTH = 1.03  # a smaller gain over the fastest Standard is within the model's error, and no reason to change a model
SAME = 0.95  # share of the fastest from which topologies count as equally fast: the model's error is larger

PREFERENCE = (
    *("standard", "ladder", "farskip", "ladder-fresh"),
    *("parallel-shared-norm", "parallel", "ladder-K", "parallel-ladder"),
)
"""Order of recommendation among equally fast topologies: first those closest to trained and measured models."""

FEWER = {"desync": "fewer all-reduces", "parallel-ladder": "half as many all-reduces, each under a whole layer,"}


@dataclasses.dataclass(frozen=True)
class Advice:
    """ladder_helps: whether the plain Ladder's speed-up is at least WORTH; None if the request leaves it out."""

    residual: str
    reason: str
    ladder_helps: bool | None


class Candidate(Protocol):
    residual: str
    speedup: float


@dataclasses.dataclass(frozen=True)
class Opponent:
    """The fastest way without changing the model. name: in words. share: of its time that communication adds.

    lengths: of a decode step, seconds of an all-reduce and of the shortest sublayer; None where that says nothing.
    """

    name: str
    share: float
    lengths: tuple[float, float] | None = None


def read(*, rows: Sequence[Candidate], opponent: Opponent, tensor: int) -> Advice:
    """The advice for a request's rows. `no-communication` is never recommended."""
    usable = [row for row in rows if row.residual != "no-communication"]
    ladders = [row.speedup for row in rows if row.residual == "ladder"]
    helps = ladders[0] >= WORTH if ladders else None
    best = max((row.speedup for row in usable), default=1.0)
    if tensor == 1:
        return Advice("standard", "no: one device communicates nothing, so there is nothing to hide", helps)
    if best < WORTH:
        communication = f"communication is {opponent.share:.1%} of its time"
        gains = f"no topology is {WORTH - 1:.0%} faster than {opponent.name}"
        return Advice("standard", f"no: {gains}; {communication}", helps)
    fast = [row for row in usable if row.speedup >= max(WORTH, SAME * best)]
    chosen = min(fast, key=lambda row: (_rank(row.residual), -row.speedup))
    return Advice(chosen.residual, _reason(chosen, usable, opponent), helps)


def lengths(baseline: Speed) -> tuple[float, float] | None:
    """Seconds of an all-reduce and of the shortest sublayer in a decode step; None without a timeline."""
    timeline = baseline.step.forward
    if timeline is None or not timeline.all_reduces:
        return None
    computes = [bar.stop - bar.start for bar in timeline.bars if not bar.wire]
    return timeline.wire / timeline.all_reduces, min(computes)


def _reason(chosen: Candidate, usable: Sequence[Candidate], opponent: Opponent) -> str:
    start = f"communication is {opponent.share:.0%} of the time of {opponent.name}"
    kind = parse_residual(chosen.residual).kind
    gain = f"{chosen.speedup:.2f} x its speed"
    if opponent.lengths is not None:
        wire, shortest = opponent.lengths
        does = "outlasts" if wire > shortest else "fits under"
        start += f", and a decode step's all-reduce ({wire * 1e6:.0f} µs) {does} its shorter sublayer"
        start += f" ({shortest * 1e6:.0f} µs)"
    if kind in ("ladder", "ladder-fresh", "farskip"):
        return f"{start}: hiding it under compute gives {gain}"
    fewer = FEWER.get(kind, "half as many all-reduces")
    ladder = next((row for row in usable if row.residual == "ladder"), None)
    comparison = f" where the plain Ladder gives {ladder.speedup:.2f}" if ladder else ""
    return f"{start}: {fewer} give {gain}{comparison}"


def _rank(residual: str) -> int:
    name = parse_residual(residual)
    key = "ladder-K" if name.kind == "ladder" and name.number > 1 else name.kind
    return PREFERENCE.index(key) if key in PREFERENCE else len(PREFERENCE)
