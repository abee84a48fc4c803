"""What a walk has met: counts, and failures with the command that repeats them."""

import collections
import re
from collections.abc import Sequence

from experiments.fuzz_configurations.draw import Case, Outcome, override

Met = Sequence[tuple[Case, Outcome]]


def described(case: Case) -> str:
    changed = {name: value for name, value in case.other.items() if case.settings.get(name) != value}
    lines = {"settings": case.dotted, "batch": case.batch, "checks": ", ".join(case.checks) or "gradients alone"}
    if "another mesh" in case.checks:
        lines["another mesh"] = " ".join(map(override, changed.items()))
    if "inference" in case.checks:
        lines["inference"] = str(case.inference)
    if case.teacher:
        lines["teacher"] = " ".join(map(override, case.teacher.items()))
    return "\n".join(f"  {name}: {text}" for name, text in lines.items())


def failure(case: Case, outcome: Outcome) -> str:
    said = outcome.said.replace("\n", "\n  ")
    return f"\ncase {case.seed}:{case.index} failed: {said}\n{described(case)}\n  again: {case.command}"


def line(met: Met) -> str:
    counts = collections.Counter(outcome.what for _, outcome in met)
    return f"{len(met)} cases: {', '.join(f'{counts[what]} {what}' for what in ('ran', 'refused', 'failed'))}"


def compared(met: Met) -> collections.Counter[str]:
    """How often each check was made."""
    return collections.Counter(check for _, outcome in met for check in outcome.done)


def refusals(met: Met) -> str:
    """Each reason, its numbers left out, and how often it was given."""
    refused = (outcome.said for _, outcome in met if outcome.what == "refused")
    reasons = collections.Counter(re.sub(r"\d+(\.\d+)?", "N", said) for said in refused)
    return "\n".join(f"{count:5d} {reason}" for reason, count in reasons.most_common())
