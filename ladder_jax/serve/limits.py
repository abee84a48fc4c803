"""Limits on a request before the engine sees it: the size of its body, and the time to send it."""

import asyncio
import dataclasses

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ladder_jax.serve.refusal import Refusal

KIND = "application/json"


@dataclasses.dataclass(frozen=True)
class Limits:
    """max_new_tokens: the most new tokens of a choice.

    body_bytes, body_seconds: the largest body, and the longest time for it to arrive.
    """

    max_new_tokens: int
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0


class Left(Exception):
    """The client disconnected."""


def limited(app: ASGIApp, *, limits: Limits) -> ASGIApp:
    """`app` with complete bodies, of content type JSON and limited size; other requests are refused."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _body(Headers(scope=scope), receive, limits=limits)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
        except Left:
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
    if body and headers.get("content-type", "").partition(";")[0].strip().lower() != KIND:
        raise Refusal(415, f"the body must be JSON, and its Content-Type {KIND}")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body is not UTF-8 (byte {error.start})") from None
    return body


async def _read(receive: Receive, *, limit: int) -> bytes:
    """The body. One that is somewhat too large is read to its end, so that the client reads the answer."""
    parts, size, more = [], 0, True
    while more and size <= 4 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Left
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
    """A `receive` that returns the body first, then the messages after it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
