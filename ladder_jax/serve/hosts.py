"""A server for this machine alone, and without a key, answers no web page from elsewhere.

A page can have its own name lead to 127.0.0.1 (DNS rebinding): its requests then come from this machine, and are of the
page's own origin. But they carry its name.
"""

import ipaddress
import socket
import urllib.parse
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ladder_jax.serve.refusal import Refusal

LOCAL = ("localhost", "127.0.0.1", "::1")


def allowed(host: str, sock: socket.socket, *, key: str | None) -> frozenset[str] | None:
    """The names of a server that was told to listen at `host`; None where others than this machine may ask, or need
    the key."""
    address = sock.getsockname()[0].partition("%")[0]
    if key is not None or not ipaddress.ip_address(address).is_loopback:
        return None
    return frozenset((*LOCAL, host.lower(), address))


def named(app: ASGIApp, *, hosts: Collection[str] | None) -> ASGIApp:
    """`app` for requests whose Host, and Origin if there is one, is one of `hosts`, with any port."""
    if hosts is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for header, status in (("host", 421), ("origin", 403)):
            for told in headers.getlist(header):
                if _name(told if header == "origin" else f"http://{told}") not in hosts:
                    names = ", ".join(f"[{name}]" if ":" in name else name for name in sorted(hosts))
                    message = f"{told[:200]!r} is none of this server's names (allowed: {names}, or an --api-key)"
                    refusal = Refusal(status, f"{header.title()} {message}", headers={"Connection": "close"})
                    return await refusal.response()(scope, receive, send)
        await app(scope, receive, send)

    return guarded


def _name(origin: str) -> str | None:
    """http://NAME:PORT, without the port and what surrounds it; None where that is no name ("null" is none)."""
    try:
        parts = urllib.parse.urlsplit(origin)
        parts.port  # noqa: B018 - raises for what is none
    except ValueError:
        return None
    if parts.username is not None or parts.scheme not in ("http", "https"):
        return None
    return (parts.hostname or "").removesuffix(".") or None
