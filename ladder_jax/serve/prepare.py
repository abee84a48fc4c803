"""Turn a request's body into the engine's requests, after all checks that need no engine."""

import secrets
from collections.abc import Callable, Sequence

from ladder_jax.decode.engine import Request
from ladder_jax.serve import unsupported
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import GenerationBody
from ladder_jax.serve.service import Service

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # the defaults


def check(body: GenerationBody, *, service: Service) -> None:
    """Raises Refusal for another model, and for unsupported parameters."""
    if body.model != service.name:
        message = f"there is no model {body.model!r}; this server has {service.name!r}"
        raise Refusal(404, message, param="model", code="model_not_found")
    unsupported.check(body)
    if body.stream_options is not None and not body.stream:
        raise Refusal(400, "stream_options needs stream: true", param="stream_options")


def check_count(prompts: int, *, n: int, service: Service) -> None:
    """Raises Refusal for no answers, or more than the queue holds. n: answers per prompt."""
    if not 0 < n * prompts <= service.engine.max_queue:
        message = f"{prompts} prompts, {n} answers each, are not from 1 to {service.engine.max_queue} in all"
        raise Refusal(400, message, param="prompt" if n == 1 else "n")


def check_text(characters: int, *, param: str, service: Service) -> None:
    """Raises Refusal for a text that exceeds the engine's capacity however it is tokenized."""
    if characters > service.max_characters:
        message = f"{characters} characters are more than the {service.engine.capacity} tokens that this server has"
        raise Refusal(400, f"{message} room for", param=param, code="context_length_exceeded")


def requests(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    default: int,
    logprobs: bool,
    service: Service,
) -> list[Request]:
    """`body.n` requests for each prompt, in order; the k-th of a prompt gets the seed + k.

    max_tokens: as in the body. None means as many as the engine has room for, up to `default`.
    """
    n, limit = body.n or 1, service.limits.max_new_tokens
    check_count(len(prompts), n=n, service=service)
    if max_tokens is not None and max_tokens > limit:
        raise Refusal(400, f"this server generates at most {limit} new tokens, not {max_tokens}", param="max_tokens")
    seed = secrets.randbits(32) if body.seed is None else body.seed

    def new_tokens(prompt: Sequence[int]) -> int:
        room = service.engine.capacity - len(prompt)
        new = max_tokens or max(1, min(default, limit, room))
        if new > room:
            message = (
                f"a prompt of {len(prompt)} tokens and {new} new ones are more than the"
                f" {service.engine.capacity} that this server has room for"
            )
            raise Refusal(400, message, param="prompt", code="context_length_exceeded")
        return new

    more = dict(seed=seed, logprobs=logprobs, stop_ids=service.tokenizer.stop_ids)
    return sampled(body, prompts, max_new_tokens=new_tokens, **more)


def sampled(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Callable[[Sequence[int]], int],
    seed: int,
    logprobs: bool,
    stop_ids: Sequence[int],
) -> list[Request]:
    """`body.n` requests for each prompt, in order, with the body's sampling settings; see `requests`.

    max_new_tokens: of a prompt.
    """
    sampling = {
        name: default if getattr(body, name) is None else getattr(body, name) for name, default in SAMPLING.items()
    }
    more = dict(stop_ids=stop_ids, stop=() if body.stop is None else body.stop, logprobs=logprobs)
    return [
        Request(prompt, max_new_tokens=max_new_tokens(prompt), seed=(seed + k) % 2**32, **sampling, **more)
        for prompt in prompts
        for k in range(body.n or 1)
    ]


def check_top_logprobs(top: int, *, body: GenerationBody, param: str) -> None:
    """Raises Refusal if the log-probabilities of the `top` most probable tokens are not available.

    The engine computes only that of the chosen token. Without sampling and penalty, this is the most probable token.
    """
    greedy = body.temperature == 0 and (body.repetition_penalty or 1) == 1
    if top > int(greedy):
        message = f"{param} must be 0 (only the chosen token), or 1 with temperature 0, not {top}"
        raise Refusal(400, message, param=param, code="unsupported_parameter")
