"""Where a run's wall time went, over all its restarts: only steps that stayed count as steps.

Every checkpoint holds the account of its moment. A run that goes on from it goes on with that account, and all time
since then, the steps made in vain, the time that it was down and the start, is lost.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax

from ladder_jax.train.folder import write_atomically

NAME = "goodput.json"

PARTS = {
    "steps": "steps",
    "data": "waiting for data",
    "evaluation": "evaluation",
    "saving": "saving",
    "compile": "compiling",
    "start": "starting",
    "lost": "lost to restarts",
}


class Account:
    """Seconds by part. `with account.time("saving")` inside of `account.time("steps")` counts as saving alone."""

    def __init__(self):
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.restarts = 0
        self.began = time.time()
        self._open = ["start"]
        self._mark = time.perf_counter()

    @contextlib.contextmanager
    def time(self, part: str) -> Iterator[None]:
        self._charge()
        self._open.append(part)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def as_dict(self) -> dict[str, Any]:
        """What `resume` takes: for a checkpoint."""
        self._charge()
        return {"time": time.time(), "seconds": dict(self.seconds), "restarts": self.restarts}

    def go_back(self, then: dict[str, Any] | None, *, restarts: int) -> None:
        """Go on with the account of a checkpoint, or from nothing: what was noted since, here or elsewhere, is lost."""
        self._mark = time.perf_counter()
        then = then or {"time": self.began, "seconds": {}, "restarts": 0}
        self.seconds = {part: float(then["seconds"].get(part, 0.0)) for part in PARTS}
        self.seconds["lost"] += max(0.0, time.time() - then["time"])
        self.restarts = then["restarts"] + restarts

    def working(self) -> dict[str, float]:
        """Seconds so far in steps, and in waiting for data: what a speed is measured in."""
        self._charge()
        return {part: self.seconds[part] for part in ("steps", "data")}

    def summary(self) -> dict[str, Any]:
        """began (since 1970), wall_seconds, goodput (their share in steps), seconds and shares by part, restarts."""
        self._charge()
        total = sum(self.seconds.values())
        shares = {part: seconds / total if total else 0.0 for part, seconds in self.seconds.items()}
        return {
            "began": self.began,
            "wall_seconds": total,
            "goodput": shares["steps"],
            "seconds": self.seconds,
            "shares": shares,
            "restarts": self.restarts,
        }

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._mark
        self._mark = now


def begin(account: Account, *, file: pathlib.Path) -> None:
    """Note when the run began; one that began before, and has no checkpoint yet, has lost all time since."""
    try:
        began = json.loads(file.read_text(encoding="utf-8"))["began"]
    except (OSError, ValueError, KeyError):
        account.began = time.time()
        if jax.process_index() == 0:
            write_atomically(file, json.dumps({"began": account.began}) + "\n")
        return
    account.began = began
    account.go_back(None, restarts=1)


def as_text(summary: dict[str, Any]) -> str:
    parts = (f"{words} {summary['shares'][part]:.1%}" for part, words in PARTS.items() if summary["shares"][part] > 0)
    wall, restarts = summary["wall_seconds"], summary["restarts"]
    times = f", {restarts} restart{'s'[: restarts != 1]}" if restarts else ""
    return f"goodput {summary['goodput']:.1%} of {wall:,.0f} s{times}: {', '.join(parts)}"
