"""From a request's body to the engine's requests, after all checks that need no engine."""

import dataclasses
import datetime
import secrets
import sys
from collections.abc import Sequence

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.decode.engine import Request
from ladder_jax.decode.request import CHOOSING, check_prompts, ends
from ladder_jax.serve.answer import ChatForm, CompletionForm, Form
from ladder_jax.serve.schema import Chat, Completion, GenerationBody, Message, Refusal

MAX_TOKENS = 16
"""OpenAI's default for completions."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """What may be asked of a model; by default without limits.

    name: the model's, which all bodies must have. chat_tokens: new tokens of a chat that does not
        say. completion_tokens: of a completion that does not.
    capacity: tokens of a prompt and its answer. max_queue: answers to one body. max_new_tokens: of
        an answer.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    chat_tokens: int
    completion_tokens: int = MAX_TOKENS
    capacity: int = sys.maxsize
    max_queue: int = sys.maxsize
    max_new_tokens: int = sys.maxsize

    def check_model(self, name: str) -> None:
        if name != self.name:
            message = f"there is no model {name!r} here; this is {self.name!r}"
            raise Refusal(404, message, param="model", code="model_not_found")

    def check_count(self, prompts: int, *, n: int) -> None:
        """Raises Refusal for no answers, or more than the queue holds. n: answers per prompt."""
        if not 0 < n * prompts <= self.max_queue:
            message = (
                f"{prompts} prompts, {n} answers each, are not from 1 to {self.max_queue} in all"
            )
            raise Refusal(400, message, param="prompt" if n == 1 else "n")

    def new_tokens(self, prompt: Sequence[int], *, asked: int | None, default: int) -> int:
        """None asked: as many as there is room for, up to `default`."""
        if asked is not None and asked > self.max_new_tokens:
            message = f"this server generates at most {self.max_new_tokens} new tokens, not {asked}"
            raise Refusal(400, message, param="max_tokens")
        room = self.capacity - len(prompt)
        new = asked or max(1, min(default, self.max_new_tokens, room))
        if new > room:
            message = (
                f"a prompt of {len(prompt)} tokens and {new} new ones are more than the {self.capacity} tokens"
                " that this server has room for"
            )
            raise Refusal(400, message, param="prompt", code="context_length_exceeded")
        return new


def prepare(
    body: GenerationBody,
    terms: Terms,
    *,
    seed: int | None = None,
    now: datetime.datetime | None = None,
) -> tuple[list[Request], Form]:
    """`body.answers` requests for each prompt, in order, and the form of their answers. Raises
    Refusal or UserError.

    The k-th answer to a prompt has the body's seed + k. seed: where the body has none; None draws
    one. now: as in `Tokenizer.render`.
    """
    terms.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")
    if isinstance(body, Chat):
        terms.check_count(1, n=body.answers)
        prompts = [_conversation(body, terms, now=now)]
        form = ChatForm
        asked = body.max_completion_tokens or body.max_tokens
        default = terms.chat_tokens
        logprobs = bool(body.logprobs)
    else:
        prompts = _prompts(body, terms)
        form = CompletionForm
        asked = body.max_tokens
        default = terms.completion_tokens
        logprobs = body.logprobs is not None
    new_tokens = [terms.new_tokens(prompt, asked=asked, default=default) for prompt in prompts]
    check_prompts(prompts, vocab_size=terms.vocab_size)  # token by token: those that have room
    if body.seed is not None:
        seed = body.seed
    elif seed is None:
        seed = secrets.randbits(32)
    stops = ends(() if body.stop is None else body.stop, tokenizer=terms.tokenizer)
    settings = {"temperature": 1.0, **body.model_dump(include={*CHOOSING}, exclude_none=True)}
    requests = [
        Request(
            prompt,
            max_new_tokens=new,
            seed=(seed + k) % 2**32,
            logprobs=logprobs,
            **stops,
            **settings,
        )
        for prompt, new in zip(prompts, new_tokens)
        for k in range(body.answers)
    ]
    return requests, form(body, prompts, terms.tokenizer)


def _prompts(body: Completion, terms: Terms) -> list[Sequence[int]]:
    """Counted before they are tokenized."""
    if body.logprobs is not None:
        _check_top_logprobs(body.logprobs, body=body, param="logprobs")
        if body.echo:
            message = "echo and logprobs exclude each other: log-probabilities of the prompt are not computed"
            raise Refusal(400, message, param="echo")
    is_single = isinstance(body.prompt, str) or body.prompt and isinstance(body.prompt[0], int)
    prompts = [body.prompt] if is_single else body.prompt
    terms.check_count(len(prompts), n=body.answers)
    return [
        terms.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]


def _conversation(body: Chat, terms: Terms, *, now: datetime.datetime | None) -> list[int]:
    if not terms.tokenizer.has_chat:
        message = f"{body.model} has no chat template; ask it at /v1/completions"
        raise Refusal(400, message, param="messages", code="no_chat_template")
    if body.top_logprobs is not None and not body.logprobs:
        raise Refusal(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    _check_top_logprobs(body.top_logprobs or 0, body=body, param="top_logprobs")
    messages = [_plain(message) for message in body.messages]
    return terms.tokenizer.chat(messages, now=now)


def _plain(message: Message) -> dict[str, str]:
    """A message as chat templates expect it: its text, and a role that every template has."""
    text = (
        message.content
        if isinstance(message.content, str)
        else "".join(part.text for part in message.content)
    )
    # OpenAI's newer name for the role
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name else {}
    return {"role": role, "content": text, **named}


def _check_top_logprobs(top: int, *, body: GenerationBody, param: str) -> None:
    """Raises Refusal if the log-probabilities of the `top` most probable tokens are not available.

    The engine computes only that of the chosen token. Without sampling and penalty, this is the
    most probable token.
    """
    greedy = body.temperature == 0 and (body.repetition_penalty or 1) == 1
    if top > int(greedy):
        message = f"{param} must be 0 (only the chosen token), or 1 with temperature 0, not {top}"
        raise Refusal(400, message, param=param, code="unsupported_parameter")
