"""From a body to what it asks, in a thread: parsed, counted and validated where no other client waits for it."""

import json
from typing import Any

import fastapi
import numpy as np
import pydantic
from fastapi.routing import APIRoute

from ladder_jax.serve import prepare, validation
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Asked
from ladder_jax.serve.service import SMALL, Service


def route_class(kind: type[Asked], *, service: Service) -> type[APIRoute]:
    """FastAPI's routes, whose JSON is an instance of `kind` already: FastAPI takes that as it is."""

    class Body(fastapi.Request):
        async def json(self) -> Asked:
            content = await self.body()
            return await service.aside(len(content), lambda: read(content, kind, service=service))

    class Route(APIRoute):
        def get_route_handler(self):
            handle = super().get_route_handler()

            async def handler(http: fastapi.Request) -> fastapi.Response:
                return await handle(Body(http.scope, http.receive))

            return handler

    return Route


def read(content: bytes, kind: type[Asked], *, service: Service) -> Asked:
    """Raises Refusal for what is no `kind`, or more than could be answered, and json's errors for what is no JSON."""
    if len(content) > SMALL:
        _check_pieces(content, service=service)
    told = json.loads(content)
    _check_counts(told, service=service)
    try:
        return kind.model_validate(told)
    except pydantic.ValidationError as error:
        raise validation.refusal(error.errors(include_url=False)) from None


def _check_pieces(content: bytes, *, service: Service) -> None:
    """Of strings, lists and objects: to make a million of them, all of Python must wait."""
    values = np.frombuffer(content.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = values == ord('"')
    outside = np.logical_not(np.logical_xor.accumulate(quotes))
    opened = np.count_nonzero(outside & ((values == ord("[")) | (values == ord("{"))))
    count, most = opened + np.count_nonzero(quotes) // 2, 8 * (service.engine.capacity + service.engine.max_queue)
    if count > most:
        raise Refusal(400, f"the body has {count} strings, lists and objects, and may have {most}")


def _check_counts(told: Any, *, service: Service) -> None:
    """Of prompts, messages and their parts, before each is looked at: a body has room for a million of them."""
    found = told if isinstance(told, dict) else {}
    prompts, messages = found.get("prompt"), found.get("messages")
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
        prepare.check_count(len(prompts), n=1, service=service)
    if isinstance(messages, list):
        contents = [one.get("content") for one in messages if isinstance(one, dict)]
        count = max(len(messages), sum(len(one) for one in contents if isinstance(one, list)))
        if count > service.engine.capacity:
            message = f"{count} messages, or parts of them, are more than the {service.engine.capacity} tokens"
            raise Refusal(
                400,
                f"{message} that this server has room for",
                param="messages",
                code="context_length_exceeded",
            )
