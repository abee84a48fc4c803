"""The bodies of requests: OpenAI's parameters, and some of our own.

Null means the default, as in OpenAI's API. `unsupported.check` handles parameters that are not declared here.
"""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from ladder_jax.decode.request import STOP_CHARACTERS


def _check_characters(text: str) -> str:
    """Raises ValueError for half of a surrogate pair: JSON can contain it, but it is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text must not hold half of a surrogate pair") from None
    return text


def _check_length(stop: str) -> str:
    if len(stop) > STOP_CHARACTERS:
        raise ValueError(f"a string may have {STOP_CHARACTERS} characters, not {len(stop)}")
    return stop


Text = Annotated[str, pydantic.AfterValidator(_check_characters)]
Tokens = Annotated[list[int], Field(fail_fast=True)]
Stop = Annotated[Text, pydantic.AfterValidator(_check_length)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=1)]


class Object(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Object):
    include_usage: bool | None = None


class GenerationBody(Object):
    """The parameters that completions and chat have in common."""

    model: str
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(None, description="answers per prompt; default 1")
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy; default 1")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="default 1: all tokens")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, description="default 0: all tokens")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="default 0: all tokens")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(None, description="default 1: none")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(None, description="modulo 2**32; default random")
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = Field(
        None, description=f"a string or a list of at most 16 strings, of at most {STOP_CHARACTERS} characters each"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Completion(GenerationBody):
    """The body of a request to /v1/completions."""

    prompt: Text | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)] = Field(
        description="a string, a list of strings, a list of tokens, or a list of lists of tokens"
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class Part(Object):
    type: Literal["text"]
    text: Text


class Message(Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)] = Field(
        description='a string or a list of {"type": "text"} parts'
    )
    name: Text | None = None


class Chat(GenerationBody):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
