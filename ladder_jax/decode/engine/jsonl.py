"""A file of prompts to a file of texts, one JSON object a line. A second run continues one that was
killed.
"""

import collections
import contextlib
import dataclasses
import io
import json
import os
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from ladder_jax import files
from ladder_jax.config import DecodeConfig, Json
from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.request import SAMPLING, NoNumbers, Request, Result, check_prompts, ends
from ladder_jax.errors import RunFailed, UserError, unknown
from ladder_jax.terminal import progress

SETTINGS = (*SAMPLING, "stop", "stop_ids")
BATCH_ID = "batch_req_"
BEGINNINGS = b'{"index": ', f'{{"id": "{BATCH_ID}'.encode()
"""How every line begins: of a prompt or an evaluation, and in OpenAI's batch format."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the file of prompts.

    index: of the prompt, from 0; in OpenAI's batch format the line's custom_id.
    digest: of everything that determines the text; an answer holds its job's index and digest.
    id: the user's name for it, any JSON.
    """

    index: int | str
    requests: tuple[Request, ...]
    digest: str
    id: Any = None

    def line(self, results: Sequence[Result | NoNumbers]) -> Json:
        """The line of an answer in the file."""
        (result,) = results
        if isinstance(result, NoNumbers):
            answer = {"text": None, "finish_reason": "error", "error": str(result)}
        else:
            answer = {
                "text": result.text,
                "finish_reason": result.finish,
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": len(result.tokens),
            }
        named = {} if self.id is None else {"id": self.id}
        return {"index": self.index, **named, **answer, "request": self.digest}

    def failed(self, line: Mapping[str, Any]) -> bool:
        """Whether the line of its answer holds an error."""
        return "error" in line


def read(
    file: str,
    *,
    defaults: DecodeConfig,
    stop: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    model: str,
) -> list[Job]:
    """The prompts in `file`. Raises UserError, with the line's number, for a mistake.

    defaults, stop: for settings that a line does not have. A line without a seed has the default +
        its index.
    model: identifies the model, in the digests.
    """

    def job(fields: Any, _: int, index: int) -> Job:
        given = _given(fields)
        own = ends(given.get("stop", stop), tokenizer=tokenizer, stop_ids=given.get("stop_ids"))
        settings = {**given, **own}
        prompt = tokenizer.encode(fields["prompt"])
        request = Request.of(prompt, config=defaults, index=index, **settings)
        check_prompts([request.prompt], vocab_size=vocab_size)
        decides = files.digest(model, dataclasses.asdict(request))
        return Job(index, (request,), decides, fields.get("id"))

    return json_lines.parsed(file, job, what="prompts")


def is_batch(file: str) -> bool:
    """Whether the first line of a file of prompts is a request in OpenAI's batch format (see
    serve/batch.py).
    """
    _, first = next(json_lines.read(files.on_disk(file)), (0, None))
    return isinstance(first, dict) and "custom_id" in first and "prompt" not in first


def _given(fields):
    """The settings of a line."""
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError('each line must be an object such as {"prompt": "Once"}')
    allowed = ("prompt", "id", *SETTINGS)
    for key in fields:
        if key not in allowed:
            raise unknown("setting", key, allowed)
    return {key: fields[key] for key in SETTINGS if fields.get(key) is not None}


def answers[Key](
    engine: Engine, asked: Mapping[Key, Sequence[Request]]
) -> Iterator[tuple[Key, list[Result | NoNumbers]]]:
    """Each key's results, as the last of its requests ends.

    engine: its queue has room for all requests of a key.
    """
    waiting = collections.deque(asked.items())
    running: dict[Key, list[Handle]] = {}
    while waiting or running:
        room = engine.max_queue - engine.stats().queued
        while waiting and len(waiting[0][1]) <= room:
            key, requests = waiting.popleft()
            running[key] = engine.submit_all(requests)
            room -= len(requests)
        engine.step()
        for key, handles in list(running.items()):
            if all(handle.done for handle in handles):
                del running[key]
                yield key, list(map(_result, handles))


def _result(handle: Handle) -> Result | NoNumbers:
    try:
        return handle.result()
    except NoNumbers as error:
        return error


def answer(jobs: Sequence[Job], *, file: str, engine_for: Callable[[list[Job]], Engine]) -> None:
    """Appends a line to `file` as each job finishes that has none there.

    The line of a job that failed holds the error. Raises RunFailed at the end if any job failed, in
    this run or one before.
    engine_for: gives the engine for these jobs.
    """
    by_index = {job.index: job for job in jobs}

    def work(left: list[Hashable]) -> Iterator[tuple[Hashable, Json]]:
        asked = {index: by_index[index].requests for index in left}
        engine = engine_for([by_index[index] for index in left])
        for index, results in answers(engine, asked):
            yield index, by_index[index].line(results)

    digests = {index: job.digest for index, job in by_index.items()}
    lines = carry_out(digests, work, file=file, label="{done}/{total} prompts")
    if failed := sum(job.failed(line) for job, line in zip(by_index.values(), lines, strict=True)):
        raise RunFailed(f"{file}: {failed} prompts have no answer; their lines say why")


# The lines of such a file, and of the results of an evaluation.


def carry_out[Key](
    digests: Mapping[Key, str],
    work: Callable[[list[Key]], Iterator[tuple[Key, Json]]],
    *,
    file: str | None = None,
    label: str | None = None,
) -> list[Json]:
    """The lines of all keys, in their order. `work` is given the keys that are left, and yields
    each one's line as it has it.

    file: holds the lines that are there already; each new one is appended as it comes.
    label: of the progress that is shown; None for none.
    Raises UserError for a file of something else, of other questions, models or settings, or that
    another process is writing, and RunFailed for a full disk.
    """
    # two runs would answer every prompt twice
    busy = f"{file}: another run is writing to it; wait for that, or name another file"
    with files.locked(file, busy=busy) if file else contextlib.nullcontext() as out:
        lines = answered(file, digests) if file else {}
        left = [key for key in digests if key not in lines]
        with progress(len(digests), done=len(lines), label=label) as update:
            found = work(left) if left else ()
            for key, line in found:
                if out:
                    append(out, line, file=file)
                lines[key] = line
                update(len(lines), "")
    return [lines[key] for key in digests]


def answered[Key](file: str, digests: Mapping[Key, str]) -> dict[Key, Json]:
    """The lines of `file`, each by the key that it answers. Removes a half-written last line from
    the file.

    digests: of all keys. Raises UserError where the file holds anything else, or answers to other
    prompts or settings.
    """
    path = pathlib.Path(file)
    content = path.read_bytes()
    *whole, half = content.split(b"\n")
    found = {}
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
            if "custom_id" in line:
                key, its_digest = line["custom_id"], line["id"].removeprefix(BATCH_ID)
            else:
                key, its_digest = line["index"], line["request"]
            is_known = digests.get(key) == its_digest
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{file} line {number} is not an answer that this command wrote"
            ) from None
        if not is_known:
            raise UserError(
                f"{file} line {number} answers another prompt, model or setting; name another file, or remove this one"
            )
        found[key] = line
    if half:
        ours = any(half.startswith(one) or one.startswith(half) for one in BEGINNINGS)
        if not ours or (_is_json(half) and b'"request' not in half):
            raise UserError(f"{file} holds something else than answers that this command wrote")
        os.truncate(path, len(content) - len(half))
    return found


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def append(out: io.FileIO, line: Mapping[str, Any], *, file: str) -> None:
    """Appends all of a line or, where the disk is full, nothing: then it raises RunFailed."""
    # An id or a text may hold half of a surrogate pair, which UTF-8 cannot encode: JSON's escape
    # stands for it.
    text = json.dumps(line, ensure_ascii=False) + "\n"
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    whole = os.fstat(out.fileno()).st_size
    try:
        while left:  # a nearly full disk takes a part, without an error
            left = left[out.write(left) :]
    except OSError as error:
        holds = "What it holds is whole"
        try:
            os.truncate(out.fileno(), whole)
        except OSError:  # the next run cuts it
            holds = "Its last line may be a part"
        raise RunFailed(
            f"{file}: {error.strerror}. {holds}, and the same command goes on from there"
        ) from error
