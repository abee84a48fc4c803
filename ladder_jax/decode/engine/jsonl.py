"""A file of prompts to a file of texts, one JSON object a line. A second run continues one that was killed."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ladder_jax import config
from ladder_jax.config import DecodeConfig
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.request import SAMPLING, NoNumbers, Request, Result, check_prompts, with_seed
from ladder_jax.errors import RunFailed, UserError, unknown

KEYS = ("prompt", "id", "stop", "stop_ids", *SAMPLING)
BEGINNING = b'{"index": '  # every line that `answer` writes begins with it


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the file of prompts.

    index: of the prompt, from 0. id: the user's name for it, if any.
    digest: of everything that determines the text; an answer holds its job's digest.
    """

    index: int
    id: str | int | None
    request: Request
    digest: str

    @property
    def requests(self) -> tuple[Request, ...]:
        return (self.request,)

    def line(self, results: Sequence[Result]) -> bytes:
        """The line of an answer in the file."""
        (result,) = results
        counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": len(result.tokens)}
        return self._line({"text": result.text, "finish_reason": result.finish, **counts})

    def failed(self, error: Exception) -> bytes:
        return self._line({"text": None, "finish_reason": "error", "error": str(error)})

    def _line(self, answer):
        named = {} if self.id is None else {"id": self.id}
        answer = {"index": self.index, **named, **answer, "request": self.digest}
        # An id may hold half of a surrogate pair, which UTF-8 cannot encode: JSON's escape stands for it.
        return json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


class AnyJob(Protocol):
    """One line of a file of prompts, in any format: its requests, and the line with their results, or with an error."""

    requests: Sequence[Request]

    def line(self, results: Sequence[Result]) -> bytes: ...

    def failed(self, error: Exception) -> bytes: ...


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

    defaults, stop, stop_ids: for settings that a line does not have. A line without a seed has the default + its index.
    model: identifies the model, in the digests.
    """
    try:
        lines = pathlib.Path(file).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {file!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file!r} is not UTF-8 text") from None
    jobs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            own = with_seed(defaults, index=len(jobs))
            request, name = _request(line, defaults=own, stop=stop, stop_ids=stop_ids, encode=encode)
            check_prompts([request.prompt], vocab_size=vocab_size)
        except UserError as error:
            raise UserError(f"{file} line {number}: {error}") from None
        whole = json.dumps([model, dataclasses.asdict(request)], sort_keys=True)
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        jobs.append(Job(len(jobs), name, request, digest))
    if not jobs:
        raise UserError(f"{file!r} holds no prompts")
    return jobs


def is_batch(file: str) -> bool:
    """Whether the first line of a file of prompts is a request in OpenAI's batch format (see serve/batch.py)."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open(file, encoding="utf-8-sig") as lines:
        first = json.loads(next((line for line in lines if line.strip()), "null"))
        return isinstance(first, dict) and "custom_id" in first and "prompt" not in first
    return False  # `read` says what is wrong


def _request(line, *, defaults, stop, stop_ids, encode):
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}") from None
    except RecursionError:
        raise UserError("this is nested too deeply") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise UserError('each line must be an object such as {"prompt": "Once"}')
    for key in fields:
        if key not in KEYS:
            raise unknown("setting", key, KEYS)
    name = fields.get("id")
    stop = fields.get("stop", stop)
    stop_ids = fields.get("stop_ids", list(stop_ids))
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise UserError(f"id must be a string or a whole number, not {json.dumps(name)}")
    if not isinstance(stop, str | list | tuple):
        raise UserError(f"stop must be a string or a list of strings, not {json.dumps(stop)}")
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise UserError(f"stop_ids must be a list of whole numbers, not {json.dumps(stop_ids)}")
    settings = {**config.to_dict(defaults), **{key: fields[key] for key in SAMPLING if key in fields}}
    sampling = config.from_dict({"decode": settings}).decode  # checks the types, too
    try:
        prompt = encode(fields["prompt"])
    except UnicodeEncodeError:
        raise UserError("the prompt holds half of a surrogate pair, which is no character") from None
    return Request.of(prompt, config=sampling, stop=stop, stop_ids=stop_ids), name


@contextlib.contextmanager
def alone(file: str) -> Iterator[None]:
    """Locks `file` for this process: two runs would answer every prompt twice. Raises UserError if another holds it."""
    new = not pathlib.Path(file).exists()
    with open(file, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{file}: another run is writing to it; wait for that, or name another file") from None
        except OSError:
            pass  # the file system has no locks
        try:
            yield
        finally:
            if new and os.fstat(held.fileno()).st_size == 0:
                os.unlink(file)


type Find[T] = Callable[[Mapping[str, Any]], T | None]
"""The job that a line answers; None for another file's, or after a change. Raises KeyError for no such line."""


def by_index(jobs: Sequence[Job]) -> Find[Job]:
    def find(line: Mapping[str, Any]) -> Job | None:
        index, digest = line["index"], line["request"]
        found = jobs[index] if 0 <= index < len(jobs) else None
        return found if found and found.digest == digest else None

    return find


def unanswered[T: AnyJob](
    file: str,
    jobs: Sequence[T],
    *,
    by: Callable[[Sequence[T]], Find[T]] = by_index,
    beginning: bytes = BEGINNING,
) -> list[T]:
    """The jobs without an answer in `file`. Removes a half-written last line from the file.

    by, beginning: of the format. Raises UserError where it holds anything else, or answers to other prompts or
    settings.
    """
    path = pathlib.Path(file)
    content = path.read_bytes() if path.exists() else b""
    whole, newline, half = content.rpartition(b"\n")
    find, done = by(jobs), set()
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        try:
            job = find(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{file} line {number} is not an answer that this command wrote") from None
        if job is None:
            raise UserError(
                f"{file} line {number} answers another prompt, model or setting; name another file, or remove this one"
            )
        done.add(id(job))
    if half:
        if not (half.startswith(beginning) or beginning.startswith(half)):
            raise UserError(f"{file} holds something else than answers that this command wrote")
        os.truncate(path, len(content) - len(half))
    return [job for job in jobs if id(job) not in done]


def answer(engine: Engine, jobs: Iterable[AnyJob], *, file: str, advance: Callable[[], object]) -> None:
    """Appends a line to `file` as each job finishes, and calls `advance` for it.

    The line of a job that failed holds the error. Raises RunFailed at the end if any job failed, and for a full disk.
    """
    waiting = collections.deque((job, place) for job in jobs for place in range(len(job.requests)))
    running: dict[Handle, tuple[AnyJob, int]] = {}
    results: dict[int, dict[int, Result | NoNumbers]] = collections.defaultdict(dict)  # by the job's id, and place
    failed = 0
    with open(file, "ab", buffering=0) as out:
        while waiting or running:
            while waiting and engine.stats().queued < engine.max_queue:
                job, place = waiting.popleft()
                running[engine.submit(job.requests[place])] = job, place
            engine.step()
            for handle in [handle for handle in running if handle.done]:
                job, place = running.pop(handle)
                results[id(job)][place] = _result(handle)
                if len(results[id(job)]) < len(job.requests):
                    continue
                of_job = [result for _, result in sorted(results.pop(id(job)).items())]
                errors = [result for result in of_job if isinstance(result, NoNumbers)]
                failed += bool(errors)
                append(out, job.failed(errors[0]) if errors else job.line(of_job), file=file)
                advance()
    if failed:
        raise RunFailed(f"{file}: {failed} prompts have no answer; their lines say why")


def _result(handle):
    try:
        return handle.result()
    except NoNumbers as error:
        return error


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
