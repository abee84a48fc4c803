"""An answer as one JSON object, or as a stream of them; what completions and chat have in common."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import fastapi
from starlette.responses import Response

from ladder_jax.decode.engine import Handle, Piece, Request, Result
from ladder_jax.serve import generation, refusal
from ladder_jax.serve.schema import Asked
from ladder_jax.serve.service import Service
from ladder_jax.serve.stream import EventStream


class Form(Protocol):
    """How a kind of answer is written: `choices` of a whole one and of a stream's parts.

    prefix: of its ids; whole, part: the `object` of either.
    """

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, result: Result) -> dict: ...

    def opening(self, index: int) -> dict | None:
        """Before the first piece, if anything is."""

    def piece(self, index: int, piece: Piece) -> dict | None:
        """None where there is nothing to tell yet."""

    def closing(self, index: int, result: Result) -> dict: ...


async def respond(
    service: Service, http: fastapi.Request, asked: Asked, requests: Sequence[Request], *, form: Form
) -> Response:
    """Puts the requests in the queue, or raises why not; then the answer, or the stream that will be it."""
    handles = generation.submit(service, requests)
    common = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if asked.stream:
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        head = {**common, "object": form.part}
        parts = _parts(service, handles, head=head, n=asked.n or 1, usage=usage, form=form)
        return EventStream(parts, ended=lambda: generation.cancel(handles))
    try:
        results = await generation.unless_dropped(http.receive, _results(service, handles))
    except generation.Dropped:
        return Response(status_code=refusal.DROPPED)
    finally:
        generation.cancel(handles)
    choices = [form.choice(index, result) for index, result in enumerate(results)]
    usage = _usage(results, n=asked.n or 1)
    return refusal.answer({**common, "object": form.whole, "choices": choices, "usage": usage})


async def _results(service: Service, handles: Sequence[Handle]) -> list[Result]:
    found: dict[int, Result] = {}
    async for index, event in generation.events(service, handles):
        if isinstance(event, Result):
            found[index] = event
    return [found[index] for index in range(len(handles))]


async def _parts(
    service: Service, handles: Sequence[Handle], *, head: dict, n: int, usage: bool, form: Form
) -> AsyncIterator[dict]:
    """The stream's objects. The one with the usage is the last, and has no choices."""
    results, blank = {}, {"usage": None} if usage else {}
    for index in range(len(handles)):
        if opening := form.opening(index):
            yield {**head, "choices": [opening], **blank}
    async for index, event in generation.events(service, handles):
        if isinstance(event, Result):
            results[index] = event
            choice = form.closing(index, event)
        else:
            choice = form.piece(index, event)
        if choice:
            yield {**head, "choices": [choice], **blank}
    if usage:
        whole = [results[index] for index in range(len(handles))]
        yield {**head, "choices": [], "usage": _usage(whole, n=n)}


def _usage(results: Sequence[Result], *, n: int) -> dict[str, int]:
    """Tokens; a prompt with several answers counts once."""
    prompt = sum(result.prompt_tokens for result in results[::n])
    new = sum(len(result.tokens) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
