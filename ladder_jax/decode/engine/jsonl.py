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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ladder_jax.config import DecodeConfig
from ladder_jax.data import json_lines
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.engine.scheduler import Handle
from ladder_jax.decode.request import SAMPLING, NoNumbers, Request, Result, check_prompts
from ladder_jax.errors import RunFailed, UserError, unknown

SETTINGS = (*SAMPLING, "stop", "stop_ids")
BEGINNING = b'{"index": '  # every line that `answer` writes begins with it, and an evaluation's


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the file of prompts.

    index: of the prompt, from 0.
    digest: of everything that determines the text; an answer holds its job's index and digest.
    id: the user's name for it, if any.
    """

    index: int
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
    stop_ids: Sequence[int] = (),
    encode: Callable[[str], Sequence[int]],
    vocab_size: int,
    model: str,
) -> list[Job]:
    """The prompts in `file`. Raises UserError, with the line's number, for a mistake.

    defaults, stop, stop_ids: for settings that a line does not have. A line without a seed has the
        default + its index.
    model: identifies the model, in the digests.
    """
    jobs = []
    for number, fields in json_lines.read(file):
        try:
            given = _given(fields)
            prompt = _tokens(fields["prompt"], encode)
            settings = {"stop": stop, "stop_ids": stop_ids, **given}
            request = Request.of(prompt, config=defaults, index=len(jobs), **settings)
            check_prompts([request.prompt], vocab_size=vocab_size)
        except UserError as error:
            raise UserError(f"{file} line {number}: {error}") from None
        decides = digest(model, dataclasses.asdict(request))
        jobs.append(Job(len(jobs), (request,), decides, fields.get("id")))
    if not jobs:
        raise UserError(f"{file!r} holds no prompts")
    return jobs


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


def _tokens(prompt, encode):
    try:
        return encode(prompt)
    except UnicodeEncodeError:
        raise UserError(
            "the prompt holds half of a surrogate pair, which is no character"
        ) from None


@contextlib.contextmanager
def alone(file: str) -> Iterator[None]:
    """Locks `file` for this process: two runs would answer every prompt twice. Raises UserError if
    another holds it.
    """
    new = not pathlib.Path(file).exists()
    with open(file, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{file}: another run is writing to it; wait for that, or name another file"
            ) from None
        except OSError:
            pass  # the file system has no locks
        try:
            yield
        finally:
            if new and os.fstat(held.fileno()).st_size == 0:
                os.unlink(file)


def identify(line: Mapping[str, Any]) -> tuple[Hashable, str]:
    """The index and the digest of the job that a line answers. Raises KeyError for no such line."""
    return line["index"], line["request"]


def unanswered[T](
    file: str,
    jobs: Sequence[T],
    *,
    identify: Callable[[Mapping[str, Any]], tuple[Hashable, str]] = identify,
    beginning: bytes = BEGINNING,
) -> list[T]:
    """The jobs without an answer in `file`. Removes a half-written last line from the file.

    jobs: each has an `index` and a `digest`. identify, beginning: of the answers' format. Raises
    UserError where the file holds anything else, or answers to other prompts or settings.
    """
    path = pathlib.Path(file)
    content = path.read_bytes() if path.exists() else b""
    whole, newline, half = content.rpartition(b"\n")
    left = {(job.index, job.digest): job for job in jobs}
    known = set(left)
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        try:
            job = identify(json.loads(line))
            is_known = job in known
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f"{file} line {number} is not an answer that this command wrote"
            ) from None
        if not is_known:
            raise UserError(
                f"{file} line {number} answers another prompt, model or setting; name another file, or remove this one"
            )
        left.pop(job, None)
    if half:
        if not (half.startswith(beginning) or beginning.startswith(half)):
            raise UserError(f"{file} holds something else than answers that this command wrote")
        os.truncate(path, len(content) - len(half))
    return list(left.values())


def answer(engine: Engine, jobs: Iterable[Job], *, file: str) -> Iterator[Job]:
    """Appends a line to `file` as each job finishes, and yields the job.

    The line of a job that failed holds the error. Raises RunFailed at the end if any job failed,
    and for a full disk.
    """
    waiting = collections.deque((job, []) for job in jobs)
    running: list[tuple[Job, list[Handle]]] = []
    failed = 0
    with open(file, "ab", buffering=0) as out:
        while waiting or running:
            while waiting and engine.stats().queued < engine.max_queue:
                job, handles = waiting[0]
                handles.append(engine.submit(job.requests[len(handles)]))
                if len(handles) == len(job.requests):
                    running.append(waiting.popleft())
            engine.step()
            for one in list(running):
                job, handles = one
                if not all(handle.done for handle in handles):
                    continue
                running.remove(one)
                results = list(map(_result, handles))
                failed += any(isinstance(result, NoNumbers) for result in results)
                append(out, encoded(job.line(results)), file=file)
                yield job
    if failed:
        raise RunFailed(f"{file}: {failed} prompts have no answer; their lines say why")


def _result(handle):
    try:
        return handle.result()
    except NoNumbers as error:
        return error


def encoded(line: Mapping[str, Any]) -> bytes:
    """JSON. An id or a text may hold half of a surrogate pair, which UTF-8 cannot encode: JSON's
    escape stands for it.
    """
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def append(out: io.FileIO, data: bytes, *, file: str) -> None:
    """Appends all of a line or, where the disk is full, nothing: then it raises RunFailed."""
    whole, left = os.fstat(out.fileno()).st_size, memoryview(data)
    try:
        while left:  # a nearly full disk takes a part, without an error
            left = left[out.write(left) :]
    except OSError as error:
        os.truncate(out.fileno(), whole)
        raise RunFailed(
            f"{file}: {error.strerror}. What it holds is whole, and the same command goes on from there"
        ) from error
