"""The rows of an evaluation, and their results in a file of JSON lines, with which a run that was
killed goes on.

lm-evaluation-harness has a cache for that (`use_cache`). It does not know which model gave an
answer, and keeps no question beside its scores; this file does, and is the result that a user
reads.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.decode.engine import jsonl

Progress = Callable[[int, int], contextlib.AbstractContextManager[Callable[[int, str], None]]]
"""`with progress(total, done) as update: update(done, "")`."""
Work = Callable[[list[int]], Iterator[tuple[int, dict]]]


@dataclasses.dataclass(frozen=True)
class Row:
    index: int
    digest: str


def carry_out(
    digests: Sequence[str], work: Work, *, file: str | None = None, progress: Progress | None = None
) -> list[dict]:
    """Every row's result, in order. `work` is given those that are left, and yields (row, result)
    as it has them.

    file: holds the results that are there already; each new one is appended as it comes.
    Raises UserError for a file of something else, or of other rows, models or settings, and
    RunFailed for a full disk.
    """
    rows = [Row(index, digest) for index, digest in enumerate(digests)]
    results = _earlier(file, rows) if file else {}
    left = [row.index for row in rows if row.index not in results]
    shown = (
        progress(len(rows), len(results))
        if progress
        else contextlib.nullcontext(lambda done, text: None)
    )
    opened = open(file, "ab", buffering=0) if file else contextlib.nullcontext()
    with shown as update, opened as out:
        for index, result in work(left) if left else ():
            if out:
                line = {"index": index, **result, "request": digests[index]}
                jsonl.append(out, jsonl.encoded(line), file=file)
            results[index] = result
            update(len(results), "")
    return [results[row.index] for row in rows]


def _earlier(file: str, rows: Sequence[Row]) -> dict[int, dict]:
    if len(jsonl.unanswered(file, rows)) == len(rows):
        return {}
    found = {}
    for line in pathlib.Path(file).read_bytes().splitlines():
        result = json.loads(line)
        del result["request"]
        found[result.pop("index")] = result
    return found
