"""/v1/chat/completions: generates the next message of a conversation, with the checkpoint's chat template."""

import datetime
from collections.abc import Callable

import fastapi

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Piece, Request, Result
from ladder_jax.serve import prepare
from ladder_jax.serve.answer import respond
from ladder_jax.serve.logprobs import chat_logprobs
from ladder_jax.serve.reading import route_class
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Chat, Message
from ladder_jax.serve.service import Service

PATH = "/v1/chat/completions"


def router(service: Service) -> fastapi.APIRouter:
    routes = fastapi.APIRouter(route_class=route_class(Chat, service=service))

    @routes.post(PATH)
    async def chat(body: Chat, http: fastapi.Request) -> fastapi.Response:
        requests = await service.in_thread(len(await http.body()), lambda: _prepare(body, service))
        return await respond(service, http, body, requests, form=ChatForm(body, service.tokenizer))

    return routes


def _prepare(body: Chat, service: Service) -> list[Request]:
    prepare.check(body, service=service)
    check_text = lambda characters: prepare.check_text(characters, param="messages", service=service)
    tokens = prompt(body, service.tokenizer, check_text=check_text)
    max_tokens = body.max_completion_tokens or body.max_tokens
    sizes = dict(max_tokens=max_tokens, default=service.limits.max_new_tokens)
    return prepare.requests(body, [tokens], **sizes, logprobs=bool(body.logprobs), service=service)


def prompt(
    body: Chat,
    tokenizer: Tokenizer,
    *,
    check_text: Callable[[int], object] = lambda characters: None,
    now: datetime.datetime | None = None,
) -> list[int]:
    """The conversation's tokens. Raises Refusal without a chat template, and for unsupported log-probabilities.

    check_text: called with the number of characters before they are tokenized. now: as in `Tokenizer.render`.
    """
    if not tokenizer.has_chat:
        message = f"{body.model} has no chat template; ask it at /v1/completions"
        raise Refusal(400, message, param="messages", code="no_chat_template")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    prepare.check_top_logprobs(body.top_logprobs or 0, body=body, param="top_logprobs")
    messages = [_plain(message) for message in body.messages]
    check_text(sum(len(message["content"]) for message in messages))
    return tokenizer.chat(messages, now=now)


def _plain(message: Message) -> dict[str, str]:
    """A message as chat templates expect it: its text, and a role that every template has."""
    text = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    role = "system" if message.role == "developer" else message.role  # OpenAI's newer name for the role
    return {"role": role, "content": text} | ({"name": message.name} if message.name else {})


class ChatForm:
    """See answer.Form."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: Chat, tokenizer: Tokenizer):
        self._top, self._tokenizer = body.top_logprobs or 0, tokenizer

    def choice(self, index: int, result: Result) -> dict:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(result), "finish_reason": result.finish}

    def opening(self, index: int) -> dict:
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, piece: Piece) -> dict | None:
        if not (piece.text or piece.logprobs):
            return None
        return self._delta(index, {"content": piece.text}) | {"logprobs": self._logprobs(piece)}

    def closing(self, index: int, result: Result) -> dict:
        return self._delta(index, {}) | {"finish_reason": result.finish}

    def _delta(self, index: int, delta: dict) -> dict:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, output: Piece | Result) -> dict | None:
        if output.logprobs is None:
            return None
        return chat_logprobs(output.tokens, output.logprobs, tokenizer=self._tokenizer, top=self._top)
