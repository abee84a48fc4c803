"""/v1/completions: generates the continuation of prompts."""

import collections
from collections.abc import Sequence

import fastapi

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Piece, Request, Result
from ladder_jax.serve import prepare
from ladder_jax.serve.answer import respond
from ladder_jax.serve.logprobs import CompletionLogprobs
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
        tokens, requests = await service.in_thread(size, lambda: _prepare(body, service))
        return await respond(service, http, body, requests, form=CompletionForm(body, tokens, service.tokenizer))

    return routes


def _prepare(body: Completion, service: Service) -> tuple[list[list[int]], list[Request]]:
    prepare.check(body, service=service)
    check(body)
    given = prompts(body)
    prepare.check_count(len(given), n=body.n or 1, service=service)
    longest = max((len(prompt) for prompt in given if isinstance(prompt, str)), default=0)
    prepare.check_text(longest, param="prompt", service=service)
    tokens = [service.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
    sizes = dict(max_tokens=body.max_tokens, default=MAX_TOKENS)
    return tokens, prepare.requests(body, tokens, **sizes, logprobs=body.logprobs is not None, service=service)


def check(body: Completion) -> None:
    """Raises Refusal for log-probabilities that are not available."""
    if body.logprobs is not None:
        prepare.check_top_logprobs(body.logprobs, body=body, param="logprobs")
        if body.echo:
            message = "echo and logprobs exclude each other: log-probabilities of the prompt are not computed"
            raise Refusal(400, message, param="echo")


def prompts(body: Completion) -> Sequence[str | Sequence[int]]:
    """Those of a body with one or several, as text or tokens."""
    is_single = isinstance(body.prompt, str) or body.prompt and isinstance(body.prompt[0], int)
    return [body.prompt] if is_single else body.prompt


class CompletionForm:
    """See answer.Form."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: Completion, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer):
        self._body, self._prompts, self._tokenizer = body, prompts, tokenizer
        top = body.logprobs or 0
        self._logprobs = collections.defaultdict(lambda: CompletionLogprobs(tokenizer=tokenizer, top=top))

    def choice(self, index: int, result: Result) -> dict:
        text = self._echo(index) + result.text
        return self._choice(index, text, output=result, reason=result.finish)

    def opening(self, index: int) -> dict | None:
        return self._choice(index, self._echo(index)) if self._body.echo else None

    def piece(self, index: int, piece: Piece) -> dict | None:
        return self._choice(index, piece.text, output=piece) if piece.text or piece.logprobs else None

    def closing(self, index: int, result: Result) -> dict:
        return self._choice(index, "", reason=result.finish)

    def _choice(
        self, index: int, text: str, *, output: Piece | Result | None = None, reason: str | None = None
    ) -> dict:
        has_logprobs = output is not None and output.logprobs is not None
        logprobs = self._logprobs[index](output.tokens, output.logprobs) if has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._prompts[index // (self._body.n or 1)]
        return self._tokenizer.to_bytes(prompt).decode(errors="replace")
