"""OpenAI's batch files: a request of the API a line, and its answer a line, without a server.

    {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny",
    "prompt": "Once"}} {"id": "batch_req_...", "custom_id": "1", "response": {"status_code": 200,
    ..., "body": {...}}, "error": null}

Bodies are those of the server, with the same checks, and so are the answers' bodies. All lines are
checked before anything is computed.
"""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from ladder_jax.config import DecodeConfig
from ladder_jax.data import json_lines
from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import NoNumbers, Result, jsonl
from ladder_jax.errors import UserError
from ladder_jax.files import digest
from ladder_jax.serve.answer import Form
from ladder_jax.serve.prepare import MAX_TOKENS, Terms, prepare
from ladder_jax.serve.schema import BODIES, Chat, Object, Refusal, parse

NO_DATE = datetime.datetime(1970, 1, 1)


class Line(Object):
    """A request."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal[*BODIES]
    body: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job(jsonl.Job):
    """One line. requests: those of its prompts, in order. digest: of all that determines the answer
    but the date, which a chat template may ask for: an answer of yesterday is one.
    """

    _: dataclasses.KW_ONLY
    form: Form

    def line(self, results: Sequence[Result | NoNumbers]) -> dict[str, Any]:
        errors = [result for result in results if isinstance(result, NoNumbers)]
        if errors:
            answer = {
                "status_code": 500,
                "body": Refusal(500, str(errors[0]), code="no_numbers").body(),
            }
        else:
            answer = {"status_code": 200, "body": self.form.answer(results)}
        response = {"request_id": f"req_{self.digest}", **answer}
        return {
            "id": jsonl.BATCH_ID + self.digest,
            "custom_id": self.index,
            "response": response,
            "error": None,
        }

    def failed(self, line: Mapping[str, Any]) -> bool:
        return line["response"]["status_code"] != 200


def read(
    file: str,
    *,
    name: str,
    tokenizer: Tokenizer,
    defaults: DecodeConfig,
    vocab_size: int,
    identity: str,
    completion_tokens: int = MAX_TOKENS,
) -> list[Job]:
    """The requests in `file`. Raises UserError, with the line's number, for a mistake.

    name: the model's, which all bodies must have. identity: of the model, in the digests. defaults:
    its seed + the number of answers (`n`) of the lines before is that of a body without one;
    max_new_tokens are the most of a chat that does not say. completion_tokens: the most of a
    completion that does not.
    """
    most = dict(chat_tokens=defaults.max_new_tokens, completion_tokens=completion_tokens)
    terms = Terms(name, tokenizer, vocab_size, **most)
    earlier = set()
    seed = defaults.seed

    def job(value: Any, *_: int) -> Job:
        nonlocal seed
        found = _job(value, terms, identity=identity, seed=seed)
        if found.index in earlier:
            raise UserError(f"custom_id {found.index!r} is that of an earlier line, too")
        earlier.add(found.index)
        seed += found.form.body.answers
        return found

    return json_lines.parsed(file, job, what="prompts")


def _job(value: Any, terms: Terms, *, identity: str, seed: int) -> Job:
    if not isinstance(value, dict):
        example = '{"custom_id": "1", "method": "POST", "url": ..., "body": {}}'
        raise UserError(f"each line must be an object such as {example}")
    line = parse(Line, json.dumps(value).encode())
    body = parse(BODIES[line.url], json.dumps(line.body).encode())
    if body.stream:
        raise UserError("stream: a batch has no streams; leave it out")
    requests, form = prepare(body, terms, seed=seed)
    undated = (
        prepare(body, terms, seed=seed, now=NO_DATE)[0] if isinstance(body, Chat) else requests
    )
    decides = map(dataclasses.asdict, undated)
    form.name = digest(identity, line.url, line.body, *decides)
    return Job(line.custom_id, tuple(requests), form.name, form=form)
