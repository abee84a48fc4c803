"""Ordered stages of examples: a file that lists them, and records split by a score to make it.

stages:
- easy.jsonl      # a JSON lines file, or a folder of them, relative to this file
- hard.jsonl

A run trains on one after another, on each for a share of its steps that is the share of its rows.
"""

import bisect
import json
import math
import pathlib
from collections.abc import Sequence

from ladder_jax.config.load import read_section
from ladder_jax.data import json_lines
from ladder_jax.errors import UserError

FILE = "stages.yaml"


def read(file: pathlib.Path) -> list[pathlib.Path]:
    """The stages' files. Raises UserError if `file` does not list any."""
    names = read_section(file, "stages", what="the list of stages")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{str(file)!r} must hold one section 'stages:', a list of files such as '- easy.jsonl'")
    return [file.parent / pathlib.Path(name).expanduser() for name in names]


def last_steps(rows: Sequence[int], *, steps: int, path: str) -> tuple[int, ...]:
    """The last step of each stage, of `rows` rows each; every stage has at least one of all `steps`.

    Raises UserError for fewer steps than stages.
    """
    if steps < len(rows):
        raise UserError(f"data.path={path!r} has {len(rows)} stages, more than train.steps={steps}")
    done, total, last = 0, sum(rows), []
    for stage, count in enumerate(rows):
        done += count
        earliest, latest = (last[-1] if last else 0) + 1, steps - (len(rows) - stage - 1)
        last.append(min(max(round(steps * done / total), earliest), latest))
    return tuple(last)


def split(
    source: pathlib.Path,
    *,
    score: str,
    names: Sequence[str],
    at: Sequence[float] | None = None,
    descending: bool = False,
) -> dict[str, list[str]]:
    """The lines of a JSON lines file by part: of ascending scores, or descending ones.

    score: the field. at: the scores between the parts, each the least of the upper part; None: parts of equal sizes,
    but for equal scores. Raises UserError for a record without a score, and for a part without records.
    """
    records = [(_score(value, score, where=f"{source}:{number}"), value) for number, value in json_lines.read(source)]
    if at is None:
        ordered = sorted(value for value, _ in records)
        at = [ordered[len(ordered) * part // len(names)] for part in range(1, len(names))] if ordered else []
    ascending = names[::-1] if descending else names
    parts: dict[str, list[str]] = {name: [] for name in names}
    for value, record in records:
        parts[ascending[bisect.bisect_right(at, value)]].append(json.dumps(record, ensure_ascii=False) + "\n")
    if empty := [name for name, lines in parts.items() if not lines]:
        bounds = ", ".join(f"{bound:g}" for bound in at) or "-"
        raise UserError(
            f"{str(source)!r}: none of {len(records)} records is {empty[0]!r}, with {score!r} divided at {bounds}"
        )
    return parts


def _score(record: object, name: str, *, where: str) -> float:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: needs a number {name!r}: this has {has}")
    return float(value)
