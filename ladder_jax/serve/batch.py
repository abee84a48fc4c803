"""OpenAI's batch files: a request of the API a line, and its answer a line, without a server.

    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "Once"}}
    {"id": "batch_req_...", "custom_id": "1", "response": {"status_code": 200, ..., "body": {...}}, "error": null}

Bodies are those of the server, with the same checks, and so are the answers' bodies. All lines are checked before
anything is computed.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from ladder_jax.config import DecodeConfig
from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Request, Result, jsonl
from ladder_jax.decode.request import check_prompts
from ladder_jax.errors import UserError, unknown
from ladder_jax.serve import answer, chat, completions, prepare, unsupported, validation
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Chat, Completion

KEYS = ("custom_id", "method", "url", "body")
BODIES = {completions.PATH: Completion, chat.PATH: Chat}
NO_DATE = datetime.datetime(1970, 1, 1)
ID = "batch_req_"
BEGINNING = f'{{"id": "{ID}'.encode()
"""How every line that `Job` makes begins."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One line. requests: `body.n` of each of its prompts, in order. digest: of all that determines the answer but the
    date, which a chat template may ask for: an answer of yesterday is one."""

    custom_id: str
    requests: tuple[Request, ...]
    digest: str
    form: Callable[[], answer.Form]
    model: str
    n: int

    def line(self, results: Sequence[Result]) -> bytes:
        form = self.form()
        choices = [form.choice(index, result) for index, result in enumerate(results)]
        body = {"id": f"{form.prefix}-{self.digest}", "object": form.whole, "created": int(time.time())}
        body |= {"model": self.model, "choices": choices, "usage": answer.usage(results, n=self.n)}
        return self._line(200, body)

    def failed(self, error: Exception) -> bytes:
        return self._line(500, Refusal(500, str(error), code="no_numbers").body())

    def _line(self, status: int, body: dict[str, Any]) -> bytes:
        response = {"status_code": status, "request_id": f"req_{self.digest}", "body": body}
        whole = {"id": ID + self.digest, "custom_id": self.custom_id, "response": response, "error": None}
        return json.dumps(whole, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def read(
    file: str, *, name: str, tokenizer: Tokenizer, defaults: DecodeConfig, vocab_size: int, identity: str
) -> list[Job]:
    """The requests in `file`. Raises UserError, with the line's number, for a mistake.

    name: the model's, which all bodies must have. identity: of the model, in the digests. defaults: its seed + the
    line's index is that of a body without one; max_new_tokens are the most of a chat that does not say.
    """
    jobs: dict[str, Job] = {}
    for number, value in json_lines.read(file):
        try:
            job = _job(value, name, tokenizer, defaults, vocab_size, identity, index=len(jobs))
        except (UserError, Refusal) as error:
            raise UserError(f"{file} line {number}: {error}") from None
        if job.custom_id in jobs:
            raise UserError(f"{file} line {number}: custom_id {job.custom_id!r} is that of an earlier line, too")
        jobs[job.custom_id] = job
    return list(jobs.values())


def by_custom_id(jobs: Sequence[Job]) -> jsonl.Find[Job]:
    known = {job.custom_id: job for job in jobs}

    def find(line: Mapping[str, Any]) -> Job | None:
        found, identity = known.get(line["custom_id"]), line["id"]
        return found if found and identity == ID + found.digest else None

    return find


def _job(
    value: Any,
    name: str,
    tokenizer: Tokenizer,
    defaults: DecodeConfig,
    vocab_size: int,
    identity: str,
    *,
    index: int,
) -> Job:
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise UserError(
            'each line must be an object such as {"custom_id": "1", "method": "POST", "url": ..., "body": {}}'
        )
    for key in value:
        if key not in KEYS:
            raise unknown("key", key, KEYS)
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise UserError("custom_id must be text")
    if value.get("method") != "POST":
        raise UserError(f"method must be 'POST', not {value.get('method')!r}")
    if not isinstance(url, str) or url not in BODIES:
        raise unknown("url", url, BODIES)
    try:
        body = BODIES[url].model_validate(value["body"])
    except pydantic.ValidationError as error:
        raise validation.refusal(error.errors(include_url=False)) from None
    if body.model != name:
        raise UserError(f"there is no model {body.model!r} here; this is {name!r}")
    unsupported.check(body)
    if body.stream:
        raise UserError("stream: a batch has no streams; leave it out")
    prompts, form = _prompts(body, tokenizer)
    undated = _prompts(body, tokenizer, now=NO_DATE)[0] if isinstance(body, Chat) else prompts
    seed = (defaults.seed + index if body.seed is None else body.seed) % 2**32
    default = defaults.max_new_tokens if isinstance(body, Chat) else completions.MAX_TOKENS
    most = (body.max_completion_tokens if isinstance(body, Chat) else None) or body.max_tokens or default
    logprobs = bool(body.logprobs) if isinstance(body, Chat) else body.logprobs is not None
    check_prompts(prompts, vocab_size=vocab_size)
    settings = dict(max_new_tokens=lambda prompt: most, seed=seed, logprobs=logprobs, stop_ids=tokenizer.stop_ids)
    requests = prepare.sampled(body, prompts, **settings)
    decides = map(dataclasses.asdict, prepare.sampled(body, undated, **settings))
    whole = json.dumps([identity, url, value["body"], *decides], sort_keys=True)
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return Job(custom_id, tuple(requests), digest, form, name, body.n or 1)


def _prompts(
    body: Completion | Chat, tokenizer: Tokenizer, *, now: datetime.datetime | None = None
) -> tuple[list[list[int]], Callable[[], answer.Form]]:
    if isinstance(body, Chat):
        return [chat.prompt(body, tokenizer, now=now)], functools.partial(chat.ChatForm, body, tokenizer)
    completions.check(body)
    prompts = completions.prompts(body)
    tokens = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return tokens, functools.partial(completions.CompletionForm, body, tokens, tokenizer)
