"""The verb `split`: the records of a JSON lines file, divided by a score into stages to train on one after another."""

import bisect
import json
import math
import pathlib
import re
from collections.abc import Sequence

from ladder_jax.data import json_lines
from ladder_jax.errors import UserError
from ladder_jax.files import write_atomically

FILE = "stages.yaml"
"""Lists the stages; see mixture.py."""


def run(args: dict) -> None:
    """Writes the stages, and prints how many records each has. Raises UserError; then nothing has been written."""
    names = args["stages"].split(",")
    named = all(re.fullmatch(r"[\w-]+", name) for name in names)
    if not named or len(set(names)) != len(names) or len(names) < 2:
        raise UserError(
            f"--stages {args['stages']}: not two or more different names of letters, digits, _, -, such as easy,hard"
        )
    at = None if args["at"] is None else _bounds(args["at"], stages=len(names))
    out = pathlib.Path(args["out"]).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {str(out)!r} exists and is not an empty folder")
    settings = dict(score=args["by"], names=names, at=at, descending=args["descending"])
    stages = split(pathlib.Path(args["source"]).expanduser(), **settings)
    out.mkdir(parents=True, exist_ok=True)
    contents = {f"{name}.jsonl": "".join(lines) for name, lines in stages.items()}
    contents[FILE] = "stages:\n" + "".join(f"- {name}\n" for name in contents)  # last: it stands for the others
    for name, content in contents.items():
        write = lambda path: pathlib.Path(path).write_text(content, encoding="utf-8")
        write_atomically(str(out / name), write)
    counts = ", ".join(f"{name} {len(lines):,}" for name, lines in stages.items())
    print(f"{out / FILE}: {counts}; train on it with data.format=examples")


def _bounds(text: str, *, stages: int) -> list[float]:
    try:
        at = [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--at {text}: not numbers, such as 0.3,0.7") from None
    if len(at) != stages - 1 or any(a >= b for a, b in zip(at, at[1:])):
        raise UserError(f"--at {text}: {stages} stages have {stages - 1} ascending scores between them")
    return at


def split(
    source: pathlib.Path, *, score: str, names: Sequence[str], at: Sequence[float] | None = None, descending: bool
) -> dict[str, list[str]]:
    """The lines of a JSON lines file by stage: of ascending scores, or descending ones.

    score: the field. at: the scores between the stages, each the least of the upper stage; None: stages of equal sizes,
    but for equal scores. Raises UserError for a record without a score, and for a stage without records.
    """
    lines = json_lines.read(source)
    records = [(_score(record, score, where=f"{source}:{number}"), record) for number, record in lines]
    if at is None:
        ordered = sorted(value for value, _ in records)
        count = len(ordered)
        at = [ordered[count * stage // len(names)] for stage in range(1, len(names))] if ordered else []
    ascending = names[::-1] if descending else names
    stages: dict[str, list[str]] = {name: [] for name in names}
    for value, record in records:
        name = ascending[bisect.bisect_right(at, value)]
        stages[name].append(json.dumps(record, ensure_ascii=False) + "\n")
    if empty := [name for name, lines in stages.items() if not lines]:
        bounds = ", ".join(f"{bound:g}" for bound in at) or "-"
        raise UserError(
            f"{str(source)!r}: none of {len(records)} records is {empty[0]!r}, with {score!r} divided at {bounds}"
        )
    return stages


def _score(record: object, name: str, *, where: str) -> float:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        has = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{where}: needs a number {name!r}: this has {has}")
    return float(value)
