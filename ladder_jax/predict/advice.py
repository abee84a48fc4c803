"""Which topology to take, and why: the nearest to Standard of those that are about as fast as the fastest."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from ladder_jax.config import parse_residual
from ladder_jax.predict.model import Speed

WORTH = 1.02  # a smaller speed-up is within what the model can tell apart, and none to change a model for
SAME = 0.95  # of the fastest: nearer than the model is to measurements, so they count as equally fast

PREFERENCE = ("standard", "ladder", "ladder-fresh", "parallel-shared-norm", "parallel", "ladder-K", "parallel-ladder")
"""Of equally fast ones the first is taken: those that are closest to what has been trained and measured."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """ladder_helps: whether the plain Ladder is worth it here; None where it was not asked about."""

    residual: str
    reason: str
    ladder_helps: bool | None


class Judged(Protocol):
    residual: str
    speed: Speed
    speedup: float


def read(*, rows: Sequence[Judged], baseline: Speed, tensor: int) -> Advice:
    """Of the rows that compute a model's true outputs; `baseline` is Standard's speed."""
    real = [row for row in rows if row.residual != "no-communication"]
    ladders = [row.speedup for row in rows if row.residual == "ladder"]
    helps = ladders[0] >= WORTH if ladders else None
    best = max((row.speedup for row in real), default=1.0)
    share = baseline.exposed_seconds / (baseline.prefill_seconds + baseline.decode_seconds)
    if tensor == 1:
        return Advice("standard", "one device communicates nothing, so there is nothing to hide", helps)
    if best < WORTH:
        why = f"communication is {share:.1%} of Standard's time here, too little for another topology to matter"
        return Advice("standard", why, helps)
    fast = [row for row in real if row.speedup >= max(WORTH, SAME * best)]
    chosen = min(fast, key=lambda row: (_rank(row.residual), -row.speedup))
    return Advice(chosen.residual, _reason(chosen, real, baseline, share), helps)


def _reason(chosen: Judged, real: Sequence[Judged], baseline: Speed, share: float) -> str:
    begin = f"communication is {share:.0%} of Standard's time here"
    kind = parse_residual(chosen.residual).kind
    wire, shortest = _lengths(baseline)
    microseconds = lambda seconds: f"{seconds * 1e6:.0f} µs"
    gain = f"{chosen.speedup:.2f} x Standard"
    if shortest is not None:
        compare = f"a decode step's all-reduce ({microseconds(wire)})"
        if wire > shortest:
            compare += f" outlasts its shorter sublayer ({microseconds(shortest)})"
        else:
            compare += f" fits under its shorter sublayer ({microseconds(shortest)})"
        begin += f", and {compare}"
    if kind in ("ladder", "ladder-fresh"):
        return f"{begin}: what it hides gives {gain}"
    less = "half as many all-reduces" + (", each under a whole layer," if kind == "parallel-ladder" else "")
    if kind == "desync":
        less = "fewer all-reduces"
    ladder = next((row for row in real if row.residual == "ladder"), None)
    beside = f" where the plain Ladder gives {ladder.speedup:.2f}" if ladder else ""
    return f"{begin}: {less} give {gain}{beside}"


def _lengths(baseline: Speed) -> tuple[float, float | None]:
    """Of Standard's decode step: seconds of an all-reduce, and of its shortest sublayer; None if not played."""
    played = baseline.step.sublayers
    if played is None or not played.all_reduces:
        return 0.0, None
    computes = [bar.stop - bar.start for bar in played.bars if not bar.wire]
    return played.wire / played.all_reduces, min(computes)


def _rank(residual: str) -> int:
    name = parse_residual(residual)
    key = "ladder-K" if name.kind == "ladder" and name.number > 1 else name.kind
    return PREFERENCE.index(key) if key in PREFERENCE else len(PREFERENCE)
