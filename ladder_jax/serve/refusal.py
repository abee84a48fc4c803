"""Error responses in OpenAI's format: {"error": {message, type, param, code}}."""

import json
from collections.abc import Mapping

from starlette.responses import Response

MAX_CHARACTERS = 1000  # of a message or a parameter's name: both may quote the client's text
TYPES = {401: "authentication_error", 429: "rate_limit_error"}
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected; used only in the metrics


class Refusal(Exception):
    """An HTTP error. status: 400 or more. param: the wrong parameter. code: a fixed identifier of the error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message if len(message) <= MAX_CHARACTERS else message[:MAX_CHARACTERS] + "...")
        self.status, self.param, self.code, self.headers = status, param and param[:MAX_CHARACTERS], code, headers

    def body(self) -> dict:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


def dumps(value: object) -> bytes:
    """JSON in UTF-8. Half of a surrogate pair is escaped, as UTF-8 cannot encode it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def json_response(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")
