"""The engine's requests for a body, with all checks that need no engine."""

import secrets
from collections.abc import Sequence

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
        raise Refusal(400, "stream_options go with stream: true", param="stream_options")


def check_count(prompts: int, *, n: int, service: Service) -> None:
    """Raises Refusal for no answers, or more than the queue holds."""
    if not 0 < n * prompts <= service.engine.max_queue:
        message = f"{prompts} prompts, {n} answers each, are not from 1 to {service.engine.max_queue} in all"
        raise Refusal(400, message, param="prompt" if n == 1 else "n")


def check_text(characters: int, *, param: str, service: Service) -> None:
    """Raises Refusal for a text that exceeds the capacity in any tokenization."""
    if characters > service.most_text:
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
    """`body.n` requests for each prompt, in order, the k-th of them with the seed + k.

    max_tokens: as in the body; None for as many as fit, up to `default`.
    """
    n, most = body.n or 1, service.limits.max_new_tokens
    check_count(len(prompts), n=n, service=service)
    if max_tokens is not None and max_tokens > most:
        raise Refusal(400, f"at most {most} new tokens can be asked for here, not {max_tokens}", param="max_tokens")
    seed = secrets.randbits(32) if body.seed is None else body.seed
    sampling = {
        name: default if getattr(body, name) is None else getattr(body, name) for name, default in SAMPLING.items()
    }
    made = []
    for prompt in prompts:
        room = service.engine.capacity - len(prompt)
        new = max_tokens or max(1, min(default, most, room))
        if new > room:
            message = (
                f"a prompt of {len(prompt)} tokens and {new} new ones are more than the"
                f" {service.engine.capacity} that this server has room for"
            )
            raise Refusal(400, message, param="prompt", code="context_length_exceeded")
        more = dict(stop_ids=service.tokenizer.stop_ids, stop=() if body.stop is None else body.stop, logprobs=logprobs)
        for k in range(n):
            made.append(Request(prompt, max_new_tokens=new, seed=(seed + k) % 2**32, **sampling, **more))
    return made


def check_top_logprobs(top: int, *, body: GenerationBody, param: str) -> None:
    """Raises Refusal where `top` tokens' log-probabilities are unavailable.

    The engine computes only the chosen token's, which without sampling and penalty is also the most probable one's.
    """
    greedy = body.temperature == 0 and (body.repetition_penalty or 1) == 1
    if top > int(greedy):
        message = f"{param} can be 0 here (each token's own log-probability), or 1 with temperature 0, not {top}"
        raise Refusal(400, message, param=param, code="unsupported_parameter")
