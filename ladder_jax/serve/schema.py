"""OpenAI's bodies of requests, with some parameters of our own, and its errors.

Null means the default, as in OpenAI's API.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ladder_jax.decode.request import STOP_CHARACTERS
from ladder_jax.errors import UserError, unknown

MAX_CHARACTERS = 1000
"""Of a message or a parameter's name: both may quote the client's text."""
ERRORS = {401: "authentication_error", 429: "rate_limit_error"}
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"


class Refusal(HTTPException, UserError):
    """An error in OpenAI's form: {"error": {message, type, param, code}}.

    param: the wrong parameter. code: a fixed identifier of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = message if len(message) <= MAX_CHARACTERS else message[:MAX_CHARACTERS] + "..."
        super().__init__(status, message, headers)
        self.param = param and param[:MAX_CHARACTERS]
        self.code = code

    def __str__(self) -> str:
        return self.detail

    def body(self) -> dict:
        other = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = ERRORS.get(self.status_code, other)
        return {
            "error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        return json_response(self.body(), status=self.status_code, headers=self.headers)


def dumps(value: object) -> bytes:
    """JSON in UTF-8. Half of a surrogate pair is escaped, as UTF-8 cannot encode it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


# OpenAI's other parameters, each with its values that have no effect. Null has no effect either.
NEUTRAL = {
    "audio": (),
    "best_of": (),  # and `n`: all that are made are then returned
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # there are no tools to call
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "refusal": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Parameters that never change an answer.
ACCEPTED = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")

Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Stop = Annotated[str, Field(max_length=STOP_CHARACTERS)]


class Object(pydantic.BaseModel):
    """Refuses parameters that are unknown, or that would be ignored."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @pydantic.model_validator(mode="after")
    def _check_others(self) -> Self:
        for name, value in self.model_extra.items():
            if name in ACCEPTED or name in NEUTRAL and value is None:
                continue
            if name not in NEUTRAL:
                # Of a long name the nearest match would take long to find.
                message = str(unknown("parameter", name[:MAX_CHARACTERS], type(self).model_fields))
                raise PydanticCustomError(UNKNOWN, "{message}", {"message": message, "name": name})
            allowed = (getattr(self, "n", None) or 1,) if name == "best_of" else NEUTRAL[name]
            if value not in allowed:
                instead = "".join(f", or {one!r}" for one in allowed)
                message = f"{name} is not supported here: leave it out{instead}"
                raise PydanticCustomError(
                    UNSUPPORTED, "{message}", {"message": message, "name": name}
                )
        return self


class StreamOptions(Object):
    include_usage: bool | None = None


class GenerationBody(Object):
    """The parameters that completions and chat have in common."""

    model: str
    n: int | None = Field(None, ge=1, le=128, description="answers per prompt; default 1")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1: all tokens")
    top_k: int | None = Field(None, ge=0, lt=2**31, description="default 0: all tokens")
    min_p: float | None = Field(None, ge=0, le=1, description="default 0: all tokens")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="default 1: none")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="modulo 2**32; default random"
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None,
        description=f"a string or a list of at most 16 strings, of at most {STOP_CHARACTERS} characters each",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def answers(self) -> int:
        """Of each prompt."""
        return self.n or 1


class Completion(GenerationBody):
    """The body of a request to /v1/completions."""

    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = Field(
        description="a string, a list of strings, a list of tokens, or a list of lists of tokens"
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)


class Part(Object):
    type: Literal["text"]
    text: str


class Message(Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] = Field(
        description='a string or a list of {"type": "text"} parts'
    )
    name: str | None = None


class Chat(GenerationBody):
    """The body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


BODIES: dict[str, type[GenerationBody]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": Chat,
}
"""By path."""
UNIONS = {
    name: field.description
    for kind in (Completion, Chat, Message)
    for name, field in kind.model_fields.items()
    if name in ("prompt", "stop", "content")
}
"""Descriptions of parameters of several types: pydantic reports an error for each of these."""


def parse[Kind: Object](kind: type[Kind], content: bytes) -> Kind:
    """An object from JSON. Raises Refusal, which names the first wrong parameter."""
    try:
        return kind.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: pydantic.ValidationError) -> Refusal:
    errors = error.errors(include_url=False, include_input=False)
    ours = [one for one in errors if one["type"] in (UNKNOWN, UNSUPPORTED)]
    first = (ours or errors)[0]
    kind = first["type"]
    path = first["loc"]
    about = first.get("ctx", {})
    if kind == "json_invalid":
        return Refusal(400, f"the body is not JSON: {about['error']}")
    if ours:
        where = _dotted((*path, ""))
        message = about["message"] if kind == UNKNOWN else where + about["message"]
        return Refusal(400, message, param=where + about["name"], code=kind)
    if not path:
        return Refusal(400, "the body must be a JSON object")
    for depth, part in enumerate(path):
        if part in UNIONS and kind != "missing":
            param = _dotted(path[: depth + 1])
            return Refusal(400, f"{param} must be {UNIONS[part]}", param=param)
    return Refusal(400, f"{_dotted(path)}: {first['msg']}", param=_dotted(path))


def _dotted(path: tuple[Any, ...]) -> str:
    """The path as text, such as "messages[0].role", without pydantic's names of a union's types
    ("list[Part]").
    """
    parts = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in path
        if "[" not in str(part)
    ]
    return "".join(parts).removeprefix(".")
