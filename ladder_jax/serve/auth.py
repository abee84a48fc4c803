"""The API key, if one is set: `Authorization: Bearer KEY` is required on every path but /health."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ladder_jax.errors import UserError
from ladder_jax.serve.refusal import Refusal

OPEN = ("/health",)


def check_key(key: str) -> None:
    """Raises UserError for a key that no header can hold."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError("the API key must be printable ASCII characters without spaces")


def authorised(app: ASGIApp, *, key: str | None) -> ASGIApp:
    """`app` for requests with the key; the others are refused before their body is read."""
    if key is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in OPEN:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # In constant time, which does not tell how much of a key is right.
            right = hmac.compare_digest(given.strip().encode(), key.encode())
            if scheme.lower() != "bearer" or not right:
                message = "wrong API key" if given else "this server wants an API key: Authorization: Bearer KEY"
                refusal = Refusal(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                return await refusal.response()(scope, receive, send)
        await app(scope, receive, send)

    return guarded
