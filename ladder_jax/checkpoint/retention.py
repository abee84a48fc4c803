"""Which checkpoints to keep: the last n, every m-th step, and the best by held-out loss."""

import dataclasses
import math
import shutil
from collections.abc import Mapping

from ladder_jax import remote
from ladder_jax.checkpoint import manifest
from ladder_jax.errors import UserError, unknown
from ladder_jax.files import AnyPath, is_remote

DELETING = "deleting."  # prefix of a folder being removed: after a kill, its rest does not look like a checkpoint


@dataclasses.dataclass(frozen=True)
class Keep:
    """last: how many of the newest to keep. every: also keep the steps divisible by it. best: also keep that many with
    the lowest held-out loss. 0 turns a rule off. The newest is always kept.
    """

    last: int = 1
    every: int = 0
    best: int = 0


def parse(words: str) -> Keep:
    """Parse `last=3,every=1000,best=1`; each rule may be left out. Raises UserError for anything else."""
    values = {}
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        if name not in (names := [field.name for field in dataclasses.fields(Keep)]):
            raise unknown("rule of --prune", name, names)
        if not value.isdecimal() or (name == "last" and int(value) < 1):
            raise UserError(f"--prune {name}={value}: {name} must be a whole number, at least {int(name == 'last')}")
        values[name] = int(value)
    return Keep(**values)


def steps_to_remove(losses: Mapping[int, float | None], *, keep: Keep) -> list[int]:
    """losses: the held-out loss of each step's checkpoint; None if it was not measured.

    One of NaN is never the best.
    """
    steps = sorted(losses)
    measured = {step: loss for step, loss in losses.items() if loss is not None and not math.isnan(loss)}
    by_loss = sorted(measured, key=lambda step: (measured[step], -step))
    kept = {*steps[-keep.last :], *by_loss[: keep.best]}
    return [step for step in steps if step not in kept and not (keep.every and step % keep.every == 0)]


def remove(folder: AnyPath) -> None:
    """Remove one step's folder. It is renamed first, so that a kill leaves no half checkpoint under its name.

    In an object store the manifest goes first, without which it does not count.
    """
    if is_remote(folder):
        return remote.remove(folder, first=manifest.NAME)
    renamed = folder.with_name(DELETING + folder.name)
    shutil.rmtree(renamed, ignore_errors=True)
    try:
        folder.rename(renamed)
    except FileNotFoundError:  # another process removed it
        return
    shutil.rmtree(renamed, ignore_errors=True)
