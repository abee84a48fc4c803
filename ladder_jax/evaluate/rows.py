"""The rows of an evaluation, and their results in a file of JSON lines, with which a run that was
killed goes on.

lm-evaluation-harness has a cache for that (`use_cache`). It does not know which model gave an
answer, and keeps no question beside its scores; this file does, and is the result that a user
reads.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ladder_jax.decode.engine import jsonl

Progress = Callable[[int, int], contextlib.AbstractContextManager[Callable[[int, str], None]]]
"""`with progress(total, done) as update: update(done, "")`."""
Work = Callable[[list[int]], Iterator[tuple[int, dict]]]


def carry_out(
    digests: Sequence[str], work: Work, *, file: str | None = None, progress: Progress | None = None
) -> list[dict]:
    """Every row's result, in order. `work` is given those that are left, and yields (row, result)
    as it has them.

    file: holds the results that are there already; each new one is appended as it comes.
    Raises UserError for a file of something else, of other rows, models or settings, or that
    another process is writing, and RunFailed for a full disk.
    """
    with jsonl.alone(file) if file else contextlib.nullcontext() as out:
        held = jsonl.answered(file, dict(enumerate(digests))) if file else {}
        results = {
            index: {key: value for key, value in line.items() if key not in ("index", "request")}
            for index, line in held.items()
        }
        every = range(len(digests))
        left = [index for index in every if index not in results]
        shown = (
            progress(len(digests), len(results))
            if progress
            else contextlib.nullcontext(lambda done, text: None)
        )
        with shown as update:
            found = work(left) if left else ()
            for index, result in found:
                if out:
                    line = {"index": index, **result, "request": digests[index]}
                    jsonl.append(out, line, file=file)
                results[index] = result
                update(len(results), "")
    return [results[index] for index in every]
