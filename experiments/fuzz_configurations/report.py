"""What a walk has met: counts, failures with the command that repeats them, and which values were drawn how often."""

import collections
import re
from typing import Any

from experiments.fuzz_configurations.draw import Case, override

LEFT_OUT = (
    "train.beta1",
    "train.clip_norm",
    "train.steps",
    "train.warmup_steps",
    "train.start",
    "model.residual_dtype",
)


def described(case: Case) -> str:
    changed = {name: value for name, value in case.other.items() if case.settings.get(name) != value}
    lines = {
        "settings": case.dotted,
        "batch": case.batch,
        "checks": ", ".join(case.checks) or "gradients alone",
        "another mesh": " ".join(map(override, changed.items())) if "another mesh" in case.checks else "",
        "inference": str(case.inference) if "inference" in case.checks else "",
        "teacher": " ".join(map(override, case.teacher.items())),
    }
    return "\n".join(f"  {name}: {text}" for name, text in lines.items() if text)


def failure(case: Case, outcome: Any) -> str:
    said = outcome.said.replace("\n", "\n  ")
    return f"\ncase {case.seed}:{case.index} failed: {said}\n{described(case)}\n  again: {case.command}"


class Tally:
    def __init__(self):
        self.counts = collections.Counter()
        self.checks = collections.Counter()
        self.values = collections.defaultdict(collections.Counter)
        self.reasons = collections.Counter()
        self.total = 0.0

    def add(self, case: Case, outcome: Any) -> None:
        self.counts[outcome.what] += 1
        self.checks.update(outcome.done)
        self.total += outcome.seconds
        for name, value in values(case).items():
            self.values[name, value][outcome.what] += 1
        if outcome.what == "refused":
            self.reasons[re.sub(r"\d+(\.\d+)?", "N", outcome.said)] += 1

    @property
    def failed(self) -> int:
        return self.counts["failed"]

    @property
    def seconds(self) -> float:
        return self.total / max(self.counts.total(), 1)

    @property
    def line(self) -> str:
        counted = ", ".join(f"{self.counts[what]} {what}" for what in ("ran", "refused", "failed"))
        return f"{self.counts.total()} cases: {counted}"

    def table(self) -> str:
        """Each drawn value: of how many cases that ran, were refused, failed."""
        rows = [f"{'what was drawn':44s} {'ran':>6s} {'refused':>8s} {'failed':>7s}"]
        for (name, value), counts in sorted(self.values.items()):
            rows.append(f"{name + '=' + value:44s} {counts['ran']:6d} {counts['refused']:8d} {counts['failed']:7d}")
        rows += [f"{'compared: ' + name:44s} {count:6d}" for name, count in sorted(self.checks.items())]
        return "\n".join(rows)

    def refusals(self) -> str:
        return "\n".join(f"{count:5d} {reason}" for reason, count in self.reasons.most_common())


def values(case: Case) -> dict[str, str]:
    """What the table counts: settings of many values by their kind."""
    found = {name: str(value) for name, value in case.settings.items() if name not in LEFT_OUT}
    if "model.ladder_layers" in found:
        found["model.ladder_layers"] = "a list" if "[" in found["model.ladder_layers"] else "a number"
    if "model.moe.capacity" in found:
        found["model.moe.capacity"] = "some dropped" if case.drops else "none dropped"
    return found | {"batch": case.batch}
