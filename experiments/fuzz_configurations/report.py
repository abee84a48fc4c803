"""What a walk has met: counts, failures with the command that repeats them, and which values were drawn how often."""

import collections
import re
from collections.abc import Sequence

from experiments.fuzz_configurations.draw import Case, Outcome, override

FIXED = "train.beta1 train.clip_norm train.steps train.warmup_steps train.start model.residual_dtype".split()
WHATS = ("ran", "refused", "failed")

Met = Sequence[tuple[Case, Outcome]]


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


def failure(case: Case, outcome: Outcome) -> str:
    said = outcome.said.replace("\n", "\n  ")
    return f"\ncase {case.seed}:{case.index} failed: {said}\n{described(case)}\n  again: {case.command}"


def line(met: Met) -> str:
    counts = collections.Counter(outcome.what for _, outcome in met)
    return f"{len(met)} cases: {', '.join(f'{counts[what]} {what}' for what in WHATS)}"


def compared(met: Met) -> collections.Counter[str]:
    """How often each check was made."""
    return collections.Counter(check for _, outcome in met for check in outcome.done)


def table(met: Met) -> str:
    """Each drawn value: of how many cases that ran, were refused, failed."""
    counts = collections.defaultdict(collections.Counter)
    for case, outcome in met:
        for name, value in values(case).items():
            counts[f"{name}={value}"][outcome.what] += 1
    lines = [f"{'what was drawn':44s} {'ran':>6s} {'refused':>8s} {'failed':>7s}"]
    for name, of in sorted(counts.items()):
        lines.append(f"{name:44s} {of['ran']:6d} {of['refused']:8d} {of['failed']:7d}")
    for name, count in sorted(compared(met).items()):
        lines.append(f"{'compared: ' + name:44s} {count:6d}")
    return "\n".join(lines)


def refusals(met: Met) -> str:
    """Each reason, its numbers left out, and how often it was given."""
    refused = (outcome.said for _, outcome in met if outcome.what == "refused")
    reasons = collections.Counter(re.sub(r"\d+(\.\d+)?", "N", said) for said in refused)
    return "\n".join(f"{count:5d} {reason}" for reason, count in reasons.most_common())


def values(case: Case) -> dict[str, str]:
    """What the table counts: settings of many values by their kind."""
    found = {name: str(value) for name, value in case.settings.items() if name not in FIXED}
    if "model.ladder_layers" in found:
        found["model.ladder_layers"] = "a list" if "[" in found["model.ladder_layers"] else "a number"
    if "model.moe.capacity" in found:
        found["model.moe.capacity"] = "some dropped" if case.drops else "none dropped"
    return found | {"batch": case.batch}
