"""API key check: if a key is set, every path except /health requires `Authorization: Bearer KEY`."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ladder_jax.errors import UserError
from ladder_jax.serve.refusal import Refusal

PUBLIC = ("/health",)


def check_key(key: str) -> None:
    """Raises UserError for a key that cannot be sent in a header."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError("the API key must be printable ASCII characters without spaces")


def authorised(app: ASGIApp, *, key: str | None) -> ASGIApp:
    """Middleware: passes requests with the key to `app`, and refuses others before reading their bodies."""
    if key is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in PUBLIC:
            scheme, _, sent = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time: the duration must not reveal how many characters of a key are right.
            right = hmac.compare_digest(sent.strip().encode(), key.encode())
            if scheme.lower() != "bearer" or not right:
                message = "wrong API key" if sent else "this server requires an API key: Authorization: Bearer KEY"
                refusal = Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                return await refusal.response()(scope, receive, send)
        await app(scope, receive, send)

    return guarded
