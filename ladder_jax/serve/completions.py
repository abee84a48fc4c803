"""/v1/completions: texts that continue prompts."""

import collections
from collections.abc import Sequence

import fastapi

from ladder_jax.decode.engine import Piece, Request, Result
from ladder_jax.serve import prepare
from ladder_jax.serve.answer import respond
from ladder_jax.serve.logprobs import OfText
from ladder_jax.serve.reading import route_class
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Completion
from ladder_jax.serve.service import Service

PATH = "/v1/completions"
MAX_TOKENS = 16  # OpenAI's default


def router(service: Service) -> fastapi.APIRouter:
    routes = fastapi.APIRouter(route_class=route_class(Completion, service=service))

    @routes.post(PATH)
    async def completions(body: Completion, http: fastapi.Request) -> fastapi.Response:
        # In a thread: tokenizing a long prompt would block the event loop.
        size = len(await http.body())
        prompts, requests = await service.aside(size, lambda: _prepare(body, service))
        return await respond(service, http, body, requests, form=_Text(body, prompts, service))

    return routes


def _prepare(body: Completion, service: Service) -> tuple[list[list[int]], list[Request]]:
    prepare.check(body, service=service)
    if body.logprobs is not None:
        prepare.check_top_logprobs(body.logprobs, body=body, param="logprobs")
        if body.echo:
            raise Refusal(400, "echo goes without logprobs: those of prompts are not computed", param="echo")
    whole = isinstance(body.prompt, str) or body.prompt and isinstance(body.prompt[0], int)
    given = [body.prompt] if whole else body.prompt
    prepare.check_count(len(given), n=body.n or 1, service=service)
    longest = max((len(one) for one in given if isinstance(one, str)), default=0)
    prepare.check_text(longest, param="prompt", service=service)
    prompts = [service.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    sizes = dict(max_tokens=body.max_tokens, default=MAX_TOKENS)
    return prompts, prepare.requests(body, prompts, **sizes, logprobs=body.logprobs is not None, service=service)


class _Text:
    """See answer.Form."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: Completion, prompts: Sequence[Sequence[int]], service: Service):
        self._body, self._prompts, self._tokenizer = body, prompts, service.tokenizer
        top = body.logprobs or 0
        self._logprobs = collections.defaultdict(lambda: OfText(tokenizer=service.tokenizer, top=top))

    def choice(self, index: int, result: Result) -> dict:
        text = self._echo(index) + result.text
        return self._choice(index, text, of=result, reason=result.finish)

    def opening(self, index: int) -> dict | None:
        return self._choice(index, self._echo(index)) if self._body.echo else None

    def piece(self, index: int, piece: Piece) -> dict | None:
        return self._choice(index, piece.text, of=piece) if piece.text or piece.logprobs else None

    def closing(self, index: int, result: Result) -> dict:
        return self._choice(index, "", reason=result.finish)

    def _choice(self, index: int, text: str, *, of: Piece | Result | None = None, reason: str | None = None) -> dict:
        logprobs = None if of is None or of.logprobs is None else self._logprobs[index](of.tokens, of.logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // (self._body.n or 1)]
        return self._tokenizer.to_bytes(prompt).decode(errors="replace")
