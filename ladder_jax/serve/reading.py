"""Parse, count and validate request bodies in a thread, so that no other client waits for that."""

import json
from typing import Any

import fastapi
import numpy as np
import pydantic
from fastapi.routing import APIRoute

from ladder_jax.serve import prepare, validation
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import GenerationBody
from ladder_jax.serve.service import SMALL_BODY, Service


def route_class(kind: type[GenerationBody], *, service: Service) -> type[APIRoute]:
    """A FastAPI route class whose requests return an instance of `kind` as their JSON, which FastAPI uses unchanged."""

    class Body(fastapi.Request):
        async def json(self) -> GenerationBody:
            content = await self.body()
            return await service.in_thread(len(content), lambda: read(content, kind, service=service))

    class Route(APIRoute):
        def get_route_handler(self):
            handle = super().get_route_handler()

            async def handler(http: fastapi.Request) -> fastapi.Response:
                return await handle(Body(http.scope, http.receive))

            return handler

    return Route


def read(content: bytes, kind: type[GenerationBody], *, service: Service) -> GenerationBody:
    """Parse a body as `kind`. Raises Refusal if it does not fit or exceeds the limits, ValueError for invalid JSON."""
    if len(content) > SMALL_BODY:
        _check_pieces(content, service=service)
    value = json.loads(content)
    _check_counts(value, service=service)
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise validation.refusal(error.errors(include_url=False)) from None


def _check_pieces(content: bytes, *, service: Service) -> None:
    """Limits the number of strings, lists and objects before parsing: a million would hold Python's lock for long."""
    values = np.frombuffer(content.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = values == ord('"')
    outside_strings = np.logical_not(np.logical_xor.accumulate(quotes))
    brackets = np.count_nonzero(outside_strings & ((values == ord("[")) | (values == ord("{"))))
    count, limit = brackets + np.count_nonzero(quotes) // 2, 8 * (service.engine.capacity + service.engine.max_queue)
    if count > limit:
        raise Refusal(400, f"the body has {count} strings, lists and objects, and may have {limit}")


def _check_counts(value: Any, *, service: Service) -> None:
    """Limits the number of prompts, messages and parts before validation: a body has room for a million of them."""
    fields = value if isinstance(value, dict) else {}
    prompts, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        prepare.check_count(len(prompts), n=1, service=service)
    if isinstance(messages, list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        count = max(len(messages), sum(len(content) for content in contents if isinstance(content, list)))
        if count > service.engine.capacity:
            message = f"{count} messages, or parts of them, are more than the {service.engine.capacity} tokens"
            raise Refusal(
                400,
                f"{message} that this server has room for",
                param="messages",
                code="context_length_exceeded",
            )
