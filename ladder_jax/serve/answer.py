"""Answers to completions and chat: one JSON object, or a stream of them."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import fastapi
from starlette.responses import Response

from ladder_jax.decode.engine import Handle, Piece, Request, Result
from ladder_jax.serve import generation, refusal
from ladder_jax.serve.schema import GenerationBody
from ladder_jax.serve.service import Service
from ladder_jax.serve.stream import EventStream


class Form(Protocol):
    """The JSON of completions or chat: the `choices` of a complete answer, and of a stream's events.

    prefix: of the answers' ids. whole: the value of `object` in a complete answer. part: that in a stream's events.
    """

    prefix: str
    whole: str
    part: str

    def choice(self, index: int, result: Result) -> dict: ...

    def opening(self, index: int) -> dict | None:
        """The event before the first piece; None if there is none."""

    def piece(self, index: int, piece: Piece) -> dict | None:
        """The event of a piece; None if there is none."""

    def closing(self, index: int, result: Result) -> dict: ...


async def respond(
    service: Service, http: fastapi.Request, body: GenerationBody, requests: Sequence[Request], *, form: Form
) -> Response:
    """Submits the requests. Returns the answer or its stream. Raises Refusal or UserError if a request is refused."""
    handles = generation.submit(service, requests)
    common = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if body.stream:
        counted = bool(body.stream_options and body.stream_options.include_usage)
        head = {**common, "object": form.part}
        parts = _parts(service, handles, head=head, n=body.n or 1, counted=counted, form=form)
        return EventStream(parts, ended=lambda: generation.cancel(handles))
    try:
        results = await generation.unless_disconnected(http.receive, _results(service, handles))
    except generation.Disconnected:
        return Response(status_code=refusal.CLIENT_CLOSED_REQUEST)
    finally:
        generation.cancel(handles)
    choices = [form.choice(index, result) for index, result in enumerate(results)]
    counts = usage(results, n=body.n or 1)
    return refusal.json_response({**common, "object": form.whole, "choices": choices, "usage": counts})


async def _results(service: Service, handles: Sequence[Handle]) -> list[Result]:
    results: dict[int, Result] = {}
    async for index, event in generation.events(service, handles):
        if isinstance(event, Result):
            results[index] = event
    return [results[index] for index in range(len(handles))]


async def _parts(
    service: Service, handles: Sequence[Handle], *, head: dict, n: int, counted: bool, form: Form
) -> AsyncIterator[dict]:
    """The stream's events. With `counted`, one more event at the end holds the token counts and no choices."""
    results, blank = {}, {"usage": None} if counted else {}
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
    if counted:
        in_order = [results[index] for index in range(len(handles))]
        yield {**head, "choices": [], "usage": usage(in_order, n=n)}


def usage(results: Sequence[Result], *, n: int) -> dict[str, int]:
    """Token counts. n: answers per prompt; a prompt counts once."""
    prompt = sum(result.prompt_tokens for result in results[::n])
    new = sum(len(result.tokens) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
