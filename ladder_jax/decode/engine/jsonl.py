"""A file of prompts to a file of texts, one JSON object a line; a run that was killed goes on where it stood."""

import collections
import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ladder_jax import config
from ladder_jax.config import DecodeConfig
from ladder_jax.decode.engine.engine import Engine
from ladder_jax.decode.request import SAMPLING, NoNumbers, Request, Result, check_prompts, with_seed
from ladder_jax.errors import RunFailed, UserError, unknown

KEYS = ("prompt", "id", "stop", "stop_ids", *SAMPLING)
BEGINNING = b'{"index": '  # of every line that `answer` writes


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the prompts: `index` counts from 0, `id` is the user's name for it, if any.

    digest: of everything that decides the text, to tell whether an answer is this job's.
    """

    index: int
    id: str | int | None
    request: Request
    digest: str


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
    """The prompts in `file`. Raises UserError, with the line's number, for what cannot be served.

    defaults, stop, stop_ids: for lines that say nothing else. Such lines draw with the seed + their index.
    model: what tells the model from others; it goes into the digests.
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
        jobs.append(Job(len(jobs), name, request, hashlib.sha256(whole.encode()).hexdigest()[:16]))
    if not jobs:
        raise UserError(f"{file!r} holds no prompts")
    return jobs


def _request(
    line: str, *, defaults: DecodeConfig, stop: Sequence[str], stop_ids: Sequence[int], encode: Callable
) -> tuple[Request, object]:
    try:
        asked = json.loads(line)
    except ValueError as error:
        raise UserError(f"this is not JSON: {error}") from None
    except RecursionError:
        raise UserError("this is nested too deeply") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise UserError('each line must be an object such as {"prompt": "Once"}')
    for key in asked:
        if key not in KEYS:
            raise unknown("setting", key, KEYS)
    name, stop, stop_ids = asked.get("id"), asked.get("stop", stop), asked.get("stop_ids", list(stop_ids))
    if not isinstance(name, str | int | None) or isinstance(name, bool):
        raise UserError(f"id must be a string or a whole number, not {json.dumps(name)}")
    if not isinstance(stop, str | list | tuple):
        raise UserError(f"stop must be a string or a list of strings, not {json.dumps(stop)}")
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise UserError(f"stop_ids must be a list of whole numbers, not {json.dumps(stop_ids)}")
    settings = {**config.to_dict(defaults), **{key: asked[key] for key in SAMPLING if key in asked}}
    sampling = config.from_dict({"decode": settings}).decode  # checks the types, too
    try:
        prompt = encode(asked["prompt"])
    except UnicodeEncodeError:
        raise UserError("the prompt holds half of a surrogate pair, which is no character") from None
    return Request.of(prompt, config=sampling, stop=stop, stop_ids=stop_ids), name


@contextlib.contextmanager
def alone(file: str) -> Iterator[None]:
    """Holds `file` for this process: two runs would answer everything twice. Raises UserError where another has it."""
    new = not pathlib.Path(file).exists()
    with open(file, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{file}: another run is writing to it; wait for that, or name another file") from None
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            if new and os.fstat(held.fileno()).st_size == 0:
                os.unlink(file)


def unanswered(file: str, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that `file` holds no answer to. A half-written last line is cut off it.

    Raises UserError for a file of something else, or of answers to other prompts or settings.
    """
    path = pathlib.Path(file)
    content = path.read_bytes() if path.exists() else b""
    whole, newline, half = content.rpartition(b"\n")
    answered = set()
    for number, line in enumerate(whole.split(b"\n") if newline else (), start=1):
        try:
            answer = json.loads(line)
            index, digest = answer["index"], answer["request"]
            job = jobs[index] if index >= 0 else None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{file} line {number} is not an answer that this command wrote") from None
        except IndexError:
            job = None
        if job is None or job.digest != digest:
            raise UserError(
                f"{file} line {number} answers another prompt, model or setting; name another file, or remove this one"
            )
        answered.add(index)
    if half:
        if not (half.startswith(BEGINNING) or BEGINNING.startswith(half)):
            raise UserError(f"{file} holds something else than answers that this command wrote")
        os.truncate(path, len(content) - len(half))
    return [job for job in jobs if job.index not in answered]


def answer(engine: Engine, jobs: Iterable[Job], *, file: str, advance: Callable[[], object]) -> None:
    """Appends a line to `file` as each job finishes, and calls `advance` for it.

    A job without an answer has a line that says why. Raises RunFailed for these in the end, and for a full disk.
    """
    waiting, running, failed = collections.deque(jobs), {}, 0
    with open(file, "ab", buffering=0) as out:
        while waiting or running:
            while waiting and engine.stats().queued < engine.max_queue:
                job = waiting.popleft()
                running[engine.submit(job.request)] = job
            engine.step()
            for handle in [handle for handle in running if handle.done]:
                job = running.pop(handle)
                try:
                    told = line(job, handle.result())
                except NoNumbers as error:
                    told, failed = _line(job, {"text": None, "finish_reason": "error", "error": str(error)}), failed + 1
                _append(out, told, file=file)
                advance()
    if failed:
        raise RunFailed(f"{file}: {failed} prompts have no answer; their lines say why")


def _append(out: io.FileIO, data: bytes, *, file: str) -> None:
    """All of a line or, where the disk is full, none of it."""
    whole, left = os.fstat(out.fileno()).st_size, memoryview(data)
    try:
        while left:  # the last bytes of a disk are written, and what did not fit is only counted
            left = left[out.write(left) :]
    except OSError as error:
        os.truncate(out.fileno(), whole)
        raise RunFailed(
            f"{file}: {error.strerror}. What it holds is whole, and the same command goes on from there"
        ) from error


def line(job: Job, result: Result) -> bytes:
    """An answer as it stands in the file."""
    counts = {"prompt_tokens": result.prompt_tokens, "new_tokens": len(result.tokens)}
    return _line(job, {"text": result.text, "finish_reason": result.finish, **counts})


def _line(job: Job, answer: dict) -> bytes:
    named = {} if job.id is None else {"id": job.id}
    answer = {"index": job.index, **named, **answer}
    # Half a surrogate pair in an id, which UTF-8 cannot hold, becomes the escape that JSON has for it.
    return json.dumps({**answer, "request": job.digest}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
