"""What is refused before a request is looked at: by names, key, shutdown, and the size and time of
its body.

Names protect against DNS rebinding: a web page can make its own host name resolve to 127.0.0.1. Its
requests then come from this machine, and the browser treats them as of the same origin. But their
headers contain the page's host name.
"""

import asyncio
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Collection

import fastapi
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ladder_jax.errors import UserError
from ladder_jax.serve.metrics import Metrics
from ladder_jax.serve.schema import BODIES, Refusal

BODY_BYTES = 4 * 2**20
BODY_SECONDS = 30.0
CONTENT_TYPE = "application/json"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
NAME = re.compile(r"(https?://)?(\[[0-9a-f:.]+\]|[^:/?#@\[\]]+?)\.?(:\d+)?")
"""Of an origin, or of a host: http://NAME:PORT, NAME:PORT."""
POLL = 0.05  # seconds


def check_key(key: str) -> None:
    """Raises UserError for a key that cannot be sent in a header."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError("the API key must be printable ASCII characters without spaces")


def own_names(host: str, sock: socket.socket, *, key: str | None) -> frozenset[str] | None:
    """The allowed names of a server that listens at `host`; None (any) if it has a key or is not
    local.
    """
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    if key is not None or not address.is_loopback:
        return None
    names = (f"[{name}]" if ":" in name else name for name in (host.lower(), str(address)))
    return frozenset((*LOCAL, *names))


class Gate:
    """The application `app` behind these checks. It counts requests, and can refuse new ones.

    key: what clients must send; None if they need none. names: allowed in `Host` and `Origin`; None
        for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None = None,
        names: Collection[str] | None = None,
        metrics: Metrics,
    ):
        self._app = app
        self._key = key
        self._names = names
        self._metrics = metrics
        self.draining = False
        self.active = 0

    def drain(self) -> int:
        """Refuses new requests for answers from now on. Returns the number in progress."""
        self.draining = True
        return self.active

    def wait(self, seconds: float, *, unless: Callable[[], bool]) -> None:
        """Waits until no answer is in progress, for at most `seconds`, or until `unless` is
        true.
        """
        deadline = time.monotonic() + seconds
        while self.active and time.monotonic() < deadline and not unless():
            time.sleep(POLL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._metrics.request(scope["path"], send) as counted_send:
            # Counted first, then refused: so `drain` in another thread misses none that is let in.
            self.active += scope["path"] in BODIES
            try:
                self._check(scope["path"], Headers(scope=scope))
                await self._app(scope, receive, counted_send)
            except Refusal as refusal:
                await refusal.response()(scope, receive, counted_send)
            finally:
                self.active -= scope["path"] in BODIES

    def _check(self, path: str, headers: Headers) -> None:
        if self._names is not None:
            self._check_names(headers)
        if self._key is not None and path != "/health":
            self._check_key(headers)
        if self.draining and path in BODIES:
            again = {"Retry-After": "5", "Connection": "close"}
            raise Refusal(
                503, "the server is shutting down; try again", code="draining", headers=again
            )

    def _check_names(self, headers: Headers) -> None:
        for header, status in (("host", 421), ("origin", 403)):
            for value in headers.getlist(header):
                found = NAME.fullmatch(value.lower())
                is_origin = bool(found and found[1])
                if not found or found[2] not in self._names or is_origin != (header == "origin"):
                    names = ", ".join(sorted(self._names))
                    message = f"{value[:200]!r} is none of this server's names (allowed: {names}, or an --api-key)"
                    raise Refusal(status, f"{header.title()} {message}")

    def _check_key(self, headers: Headers) -> None:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        # In constant time: the duration must not reveal how many characters of a key are right.
        right = hmac.compare_digest(sent.strip().encode(), self._key.encode())
        if scheme.lower() != "bearer" or not right:
            message = (
                "wrong API key"
                if sent
                else "this server requires an API key: Authorization: Bearer KEY"
            )
            raise Refusal(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )


async def read_body(
    http: fastapi.Request, *, most: int = BODY_BYTES, seconds: float = BODY_SECONDS
) -> bytes:
    """Raises Refusal for a body that is too large, too slow, or not JSON.

    Starlette's own limit answers in plain text, and waits for as long as it takes.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in http.stream():
                content += part
                if len(content) > most:
                    raise Refusal(413, f"the request's body may have {most} bytes")
    except TimeoutError:
        message = f"the request's body did not come within {seconds:g} seconds"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content and kind != CONTENT_TYPE:
        raise Refusal(415, f"the body must be JSON, and its Content-Type {CONTENT_TYPE}")
    return bytes(content)
