"""Error answers in OpenAI's form: {"error": {message, type, param, code}}."""

import json
from collections.abc import Mapping

from starlette.responses import Response

LONGEST = 1000  # characters of a message or a parameter's name: both may quote what the client sent
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
DROPPED = 499  # nginx's status for a client that disconnected; only the metrics see it


class Refusal(Exception):
    """An HTTP status of 400 or more, with its reason; `param` is the wrong parameter, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message if len(message) <= LONGEST else message[:LONGEST] + "...")
        self.status, self.param, self.code, self.headers = status, param and param[:LONGEST], code, headers

    def body(self) -> dict:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return answer(self.body(), status=self.status, headers=self.headers)


def dumps(value: object) -> bytes:
    """JSON, with JSON's escape for half of a surrogate pair, which UTF-8 cannot encode."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def answer(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")
