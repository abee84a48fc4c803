"""Portions of a token store, which several commands make, on one machine or on many that do not communicate.

Portion i of n (`--part i/n`) is the folder `part-i-of-n` in the store's: the tokens of every n-th part of the sources,
from the i-th on, and a manifest once all are written. The command without --part joins the portions.
"""

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from ladder_jax.data.store import manifest as manifests
from ladder_jax.data.store import resume
from ladder_jax.data.store.manifest import FINISHED, JOURNAL, MANIFEST, PORTION, Manifest, Shard
from ladder_jax.data.store.part import Done
from ladder_jax.data.store.sources import Part
from ladder_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Portion:
    """Number `index`, from 1, of `count`."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Portion":
        """Of "2/8". Raises UserError."""
        numbers = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise UserError(f"--part {text} must be I/N with I from 1 to N, such as 2/8")
        return cls(int(numbers[1]), int(numbers[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        return f"part-{self.index}-of-{self.count}"

    def of(self, plan: Sequence[Part]) -> Sequence[Part]:
        return plan[self.index - 1 :: self.count]


def finish(folder: pathlib.Path, settings: Manifest, plan: Sequence[Part], counts: Sequence[Done]) -> Manifest:
    """Write the portion's manifest: one shard, whose tokens lie in the files of its parts."""
    total = lambda what: sum(getattr(done, what) for done in counts)
    digests = tuple(part.digest for part in plan)
    shard = Shard("00000", total("tokens"), total("documents"), "", digests, total("empty"), total("skipped"))
    finished = dataclasses.replace(settings, shards=(shard,))
    manifests.write(finished, folder / FINISHED)
    return finished


def check_no_store(out: pathlib.Path) -> None:
    """Raises UserError where `out` holds a store that is finished, being joined, or was begun without --part."""
    for name in (MANIFEST, JOURNAL):
        if (out / name).exists():
            raise UserError(
                f"--out {out}: the store there is finished, or its parts are being joined, or it was begun without"
                " --part: leave --part out, or name another --out"
            )


def folders(out: pathlib.Path, settings: Manifest, plan: Sequence[Part]) -> list[pathlib.Path]:
    """The folders of all portions in order; an empty list if the store is not made in portions.

    Raises UserError where a portion is missing or unfinished, or has other sources or settings.
    """
    names = [path.name for path in out.iterdir() if PORTION.fullmatch(path.name)] if out.is_dir() else []
    counts = sorted({int(PORTION.fullmatch(name)[2]) for name in names})
    if not names:
        return []
    if len(counts) > 1:
        raise UserError(f"--out {out} holds parts of {counts[0]} and parts of {counts[1]}: remove those or these")
    portions = [Portion(index, counts[0]) for index in range(1, counts[0] + 1)]
    for portion in portions:
        _check(portion, out, settings, plan)
    return [out / portion.name for portion in portions]


def _check(portion: Portion, out: pathlib.Path, settings: Manifest, plan: Sequence[Part]) -> None:
    folder, again = out / portion.name, f"run the command with --part {portion}"
    if not folder.exists():
        raise UserError(f"part {portion} of {str(out)!r} is missing: {again}")
    if not (folder / FINISHED).exists():
        raise UserError(f"part {portion} of {str(out)!r} is not finished: {again}")
    finished = manifests.read(folder / FINISHED)
    resume.check_settings(folder, finished, settings)
    if finished.shards[0].parts != tuple(part.digest for part in portion.of(plan)):
        raise UserError(f"part {portion} of {str(out)!r} is of other sources, or they have changed: {again}")
