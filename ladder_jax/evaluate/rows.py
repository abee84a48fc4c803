"""The rows of an evaluation, and their results in a file of JSON lines, with which a run that was killed goes on."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ladder_jax.decode.engine import jsonl

Progress = Callable[[int, int], contextlib.AbstractContextManager[Callable[[int, str], None]]]
"""`with progress(total, done) as update: update(done, "")`."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One question: digest is of all that decides its result, to tell whether one in a file is this row's."""

    index: int
    digest: str

    @classmethod
    def of(cls, index: int, *decides: Any) -> "Row":
        """`decides` must be JSON."""
        return cls(index, hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16])


Work = Callable[[list[Row]], Iterator[tuple[Row, dict]]]


def carry_out(
    rows: Sequence[Row], work: Work, *, file: str | None = None, progress: Progress | None = None
) -> list[dict]:
    """Every row's result, in order. `work` is given the rows that are left, and yields (row, result) as it has them.

    file: holds the results that are there already; each new one is appended as it comes.
    Raises UserError for a file of something else, or of other rows, models or settings, and RunFailed for a full disk.
    """
    results = _earlier(file, rows) if file else {}
    left = [row for row in rows if row.index not in results]
    shown = progress(len(rows), len(results)) if progress else contextlib.nullcontext(lambda done, text: None)
    opened = open(file, "ab", buffering=0) if file else contextlib.nullcontext()
    with shown as update, opened as out:
        for row, result in work(left) if left else ():
            if out:
                line = json.dumps({"index": row.index, **result, "request": row.digest}, ensure_ascii=False)
                jsonl.append(out, line.encode("utf-8", "backslashreplace") + b"\n", file=file)
            results[row.index] = result
            update(len(results), "")
    return [results[row.index] for row in rows]


def _earlier(file: str, rows: Sequence[Row]) -> dict[int, dict]:
    left = {row.index for row in jsonl.unanswered(file, rows)}
    if len(left) == len(rows):
        return {}
    lines = map(json.loads, pathlib.Path(file).read_bytes().splitlines())
    return {line.pop("index"): {k: v for k, v in line.items() if k != "request"} for line in lines}
