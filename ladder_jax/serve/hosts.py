"""Protection against DNS rebinding: a local server without a key refuses requests from web pages of other sites.

Such a page can make its own host name resolve to 127.0.0.1. Its requests then come from this machine, and the browser
treats them as of the same origin. But their headers contain the page's host name.
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
    """The allowed host names of a server that listens at `host`; None (any) if it has a key or is not local."""
    address = sock.getsockname()[0].partition("%")[0]
    if key is not None or not ipaddress.ip_address(address).is_loopback:
        return None
    return frozenset((*LOCAL, host.lower(), address))


def restricted(app: ASGIApp, *, hosts: Collection[str] | None) -> ASGIApp:
    """Middleware: refuses requests whose Host, or Origin if present, is not in `hosts`. Any port is allowed."""
    if hosts is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for header, status in (("host", 421), ("origin", 403)):
            for value in headers.getlist(header):
                if _name(value if header == "origin" else f"http://{value}") not in hosts:
                    names = ", ".join(f"[{name}]" if ":" in name else name for name in sorted(hosts))
                    message = f"{value[:200]!r} is none of this server's names (allowed: {names}, or an --api-key)"
                    refusal = Refusal(status, f"{header.title()} {message}", headers={"Connection": "close"})
                    return await refusal.response()(scope, receive, send)
        await app(scope, receive, send)

    return guarded


def _name(origin: str) -> str | None:
    """The host name in http://NAME:PORT; None if there is none, as in the origin "null"."""
    try:
        parts = urllib.parse.urlsplit(origin)
        parts.port  # noqa: B018 - raises ValueError for an invalid port
    except ValueError:
        return None
    if parts.username is not None or parts.scheme not in ("http", "https"):
        return None
    return (parts.hostname or "").removesuffix(".") or None
