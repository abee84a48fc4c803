"""Limits on a request's body, checked before it is parsed: its size, and the time to send it."""

import asyncio
import dataclasses

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ladder_jax.serve.refusal import Refusal

CONTENT_TYPE = "application/json"


@dataclasses.dataclass(frozen=True)
class Limits:
    """max_new_tokens: new tokens per answer, at most. body_bytes, body_seconds: size of a body, and time to send it."""

    max_new_tokens: int
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0


class Disconnected(Exception):
    """The client disconnected."""


def limited(app: ASGIApp, *, limits: Limits) -> ASGIApp:
    """Middleware: reads the whole body, and refuses one that is too large, too slow, or not JSON in UTF-8."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _body(Headers(scope=scope), receive, limits=limits)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        except Disconnected:
            return
        else:
            await app(scope, _after(body, receive), send)

    return guarded


async def _body(headers: Headers, receive: Receive, *, limits: Limits) -> bytes:
    try:
        async with asyncio.timeout(limits.body_seconds):
            body = await _read(receive, limit=limits.body_bytes)
    except TimeoutError:
        message = f"the request's body did not come within {limits.body_seconds:g} seconds"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    if body and headers.get("content-type", "").partition(";")[0].strip().lower() != CONTENT_TYPE:
        raise Refusal(415, f"the body must be JSON, and its Content-Type {CONTENT_TYPE}")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 (byte {error.start})") from None
    return body


async def _read(receive: Receive, *, limit: int) -> bytes:
    """Read the body. One of up to 4 x `limit` bytes is read to its end, so that the client reads our answer."""
    parts, size, more = [], 0, True
    while more and size <= 4 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
        if size <= limit:
            parts.append(message.get("body", b""))
        else:
            parts.clear()
    if size > limit:
        raise Refusal(413, f"the request's body may have {limit} bytes", headers={"Connection": "close"})
    return b"".join(parts)


def _after(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then the messages that follow it."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
