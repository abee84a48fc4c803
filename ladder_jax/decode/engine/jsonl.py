"""A file of prompts to a file of texts, one JSON object a line. A second run continues one that was
killed.
"""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ladder_jax.config import DecodeConfig
from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.engine.scheduler import Handle
from ladder_jax.decode.request import SAMPLING, NoNumbers, Request, Result, check_prompts, ends
from ladder_jax.errors import RunFailed, UserError, unknown

SETTINGS = (*SAMPLING, "stop", "stop_ids")
BATCH_ID = "batch_req_"
BEGINNINGS = b'{"index": ', f'{{"id": "{BATCH_ID}'.encode()
"""How every line of an answer begins: of a prompt or an evaluation, and in OpenAI's batch format."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the file of prompts.

    index: of the prompt, from 0; in OpenAI's batch format the line's custom_id.
    digest: of everything that determines the text; an answer holds its job's index and digest.
    id: the user's name for it, if any.
    """

    index: int | str
    requests: tuple[Request, ...]
    digest: str
    id: str | int | None = None

    def line(self, results: Sequence[Result | NoNumbers]) -> dict[str, Any]:
        """The line of an answer in the file."""
        (result,) = results
        if isinstance(result, NoNumbers):
            answer = {"text": None, "finish_reason": "error", "error": str(result)}
        else:
            counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": len(result.tokens)}
            answer = {"text": result.text, "finish_reason": result.finish, **counts}
        named = {} if self.id is None else {"id": self.id}
        return {"index": self.index, **named, **answer, "request": self.digest}


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
        settings = {**ends(given.get("stop", stop), tokenizer=tokenizer), **given}
        prompt = tokenizer.encode(fields["prompt"])
        request = Request.of(prompt, config=defaults, index=index, **settings)
        check_prompts([request.prompt], vocab_size=vocab_size)
        decides = digest(model, dataclasses.asdict(request))
        return Job(index, (request,), decides, fields.get("id"))

    return json_lines.parsed(file, job, what="prompts")


def digest(*decides: Any) -> str:
    """Of all that decides a result, to tell whether one in a file is this one. `decides` must be
    JSON.
    """
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def is_batch(file: str) -> bool:
    """Whether the first line of a file of prompts is a request in OpenAI's batch format (see
    serve/batch.py).
    """
    _, first = next(json_lines.read(file), (0, None))
    return isinstance(first, dict) and "custom_id" in first and "prompt" not in first


def _given(fields):
    """The settings of a line."""
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError('each line must be an object such as {"prompt": "Once"}')
    allowed = ("prompt", "id", *SETTINGS)
    for key in fields:
        if key not in allowed:
            raise unknown("setting", key, allowed)
    name = fields.get("id")
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise UserError(f"id must be a string or a whole number, not {json.dumps(name)}")
    return {key: fields[key] for key in SETTINGS if fields.get(key) is not None}


@contextlib.contextmanager
def alone(file: str) -> Iterator[io.FileIO]:
    """Opens `file` to append to it, and locks it for this process: two runs would answer every
    prompt twice. Raises UserError if another holds it.
    """
    with open(file, "ab", buffering=0) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{file}: another run is writing to it; wait for that, or name another file"
            ) from None
        except OSError:
            pass  # the file system has no locks
        yield held


def unanswered(file: str, jobs: Sequence[Job]) -> list[Job]:
    """The jobs without an answer in `file`. See `answered`."""
    held = answered(file, {job.index: job.digest for job in jobs})
    return [job for job in jobs if job.index not in held]


def answered(file: str, digests: Mapping[Hashable, str]) -> dict[Hashable, dict[str, Any]]:
    """The lines of `file`, each by the index of the job that it answers. Removes a half-written
    last line from the file.

    digests: of all jobs, by index. Raises UserError where the file holds anything else, or answers
    to other prompts or settings.
    """
    path = pathlib.Path(file)
    content = path.read_bytes() if path.exists() else b""
    whole, newline, half = content.rpartition(b"\n")
    found = {}
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        try:
            answer = json.loads(line)
            index, its_digest = _job_of(answer)
            is_known = index in digests and digests[index] == its_digest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{file} line {number} is not an answer that this command wrote"
            ) from None
        if not is_known:
            raise UserError(
                f"{file} line {number} answers another prompt, model or setting; name another file, or remove this one"
            )
        found[index] = answer
    if half:
        if not any(half.startswith(one) or one.startswith(half) for one in BEGINNINGS):
            raise UserError(f"{file} holds something else than answers that this command wrote")
        os.truncate(path, len(content) - len(half))
    return found


def _job_of(answer):
    """The index and the digest of the job that a line answers, in either format."""
    if "custom_id" in answer:
        return answer["custom_id"], answer["id"].removeprefix(BATCH_ID)
    return answer["index"], answer["request"]


def answer(engine: Engine, jobs: Iterable[Job], *, file: str) -> Iterator[Job]:
    """Appends a line to `file` as each job finishes, and yields the job.

    The line of a job that failed holds the error. Raises RunFailed at the end if any job failed,
    and for a full disk.
    engine: its queue has room for all requests of a job.
    """
    waiting = collections.deque(jobs)
    running: list[tuple[Job, list[Handle]]] = []
    failed = 0
    with open(file, "ab", buffering=0) as out:
        while waiting or running:
            room = engine.max_queue - engine.stats().queued
            while waiting and len(waiting[0].requests) <= room:
                job = waiting.popleft()
                running.append((job, engine.submit_all(job.requests)))
                room -= len(job.requests)
            engine.step()
            for one in list(running):
                job, handles = one
                if not all(handle.done for handle in handles):
                    continue
                running.remove(one)
                results = list(map(_result, handles))
                failed += any(isinstance(result, NoNumbers) for result in results)
                append(out, job.line(results), file=file)
                yield job
    if failed:
        raise RunFailed(f"{file}: {failed} prompts have no answer; their lines say why")


def _result(handle):
    try:
        return handle.result()
    except NoNumbers as error:
        return error


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
        os.truncate(out.fileno(), whole)
        raise RunFailed(
            f"{file}: {error.strerror}. What it holds is whole, and the same command goes on from there"
        ) from error
