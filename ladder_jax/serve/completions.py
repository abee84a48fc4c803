"""/v1/completions: texts that go on where prompts end."""

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
    async def completions(asked: Completion, http: fastapi.Request) -> fastapi.Response:
        # A long prompt takes its time to be cut into tokens: not on the event loop's.
        size = len(await http.body())
        prompts, requests = await service.aside(size, lambda: _prepare(asked, service))
        return await respond(service, http, asked, requests, form=_Text(asked, prompts, service))

    return routes


def _prepare(asked: Completion, service: Service) -> tuple[list[list[int]], list[Request]]:
    prepare.check(asked, service=service)
    if asked.logprobs is not None:
        prepare.check_top_logprobs(asked.logprobs, asked=asked, param="logprobs")
        if asked.echo:
            raise Refusal(400, "echo goes without logprobs: those of prompts are not computed", param="echo")
    whole = isinstance(asked.prompt, str) or asked.prompt and isinstance(asked.prompt[0], int)
    given = [asked.prompt] if whole else asked.prompt
    prepare.check_count(len(given), n=asked.n or 1, service=service)
    longest = max((len(one) for one in given if isinstance(one, str)), default=0)
    prepare.check_text(longest, param="prompt", service=service)
    prompts = [service.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    sizes = dict(max_tokens=asked.max_tokens, default=MAX_TOKENS)
    return prompts, prepare.requests(asked, prompts, **sizes, logprobs=asked.logprobs is not None, service=service)


class _Text:
    """See answer.Form."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Completion, prompts: Sequence[Sequence[int]], service: Service):
        self._asked, self._prompts, self._tokenizer = asked, prompts, service.tokenizer
        top = asked.logprobs or 0
        self._logprobs = collections.defaultdict(lambda: OfText(tokenizer=service.tokenizer, top=top))

    def choice(self, index: int, result: Result) -> dict:
        text = self._echo(index) + result.text
        return self._choice(index, text, of=result, reason=result.finish)

    def opening(self, index: int) -> dict | None:
        return self._choice(index, self._echo(index)) if self._asked.echo else None

    def piece(self, index: int, piece: Piece) -> dict | None:
        return self._choice(index, piece.text, of=piece) if piece.text or piece.logprobs else None

    def closing(self, index: int, result: Result) -> dict:
        return self._choice(index, "", reason=result.finish)

    def _choice(self, index: int, text: str, *, of: Piece | Result | None = None, reason: str | None = None) -> dict:
        logprobs = None if of is None or of.logprobs is None else self._logprobs[index](of.tokens, of.logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        if not self._asked.echo:
            return ""
        prompt = self._prompts[index // (self._asked.n or 1)]
        return self._tokenizer.to_bytes(prompt).decode(errors="replace")
