"""A server on a loopback address without a key refuses requests from other sites' web pages (DNS rebinding).

A page can make its own host name resolve to 127.0.0.1. Its requests then come from this machine, and for the browser
they are of the same origin, but their headers hold the page's host name.
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
    """The host names of a server that listens at `host`; None where other machines may connect, or a key is needed."""
    address = sock.getsockname()[0].partition("%")[0]
    if key is not None or not ipaddress.ip_address(address).is_loopback:
        return None
    return frozenset((*LOCAL, host.lower(), address))


def named(app: ASGIApp, *, hosts: Collection[str] | None) -> ASGIApp:
    """`app` for requests whose Host and, if present, Origin are among `hosts`, with any port."""
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
    """NAME of http://NAME:PORT; None where there is none, as in the origin "null"."""
    try:
        parts = urllib.parse.urlsplit(origin)
        parts.port  # noqa: B018 - raises ValueError for an invalid port
    except ValueError:
        return None
    if parts.username is not None or parts.scheme not in ("http", "https"):
        return None
    return (parts.hostname or "").removesuffix(".") or None
