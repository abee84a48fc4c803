"""Unsupported parameters: refused by name, unless their value has no effect."""

from collections.abc import Iterator

from ladder_jax.errors import unknown
from ladder_jax.serve.refusal import LONGEST, Refusal
from ladder_jax.serve.schema import Object

# OpenAI's other parameters, and their values without effect. Null has none either.
NEUTRAL = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # of no tools
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


def check(body: Object) -> None:
    """Raises Refusal for the first parameter, at any depth, that is unknown or not supported."""
    for path, name, value, known in _extras(body, ""):
        if name in ACCEPTED or value is None and name in NEUTRAL:
            continue
        if name not in NEUTRAL:
            message = str(
                unknown("parameter", (path + name)[:LONGEST], known)
            )  # finding the nearest match of a long name takes long
            raise Refusal(400, message, param=path + name, code="unknown_parameter")
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = "".join(f", or {neutral!r}" for neutral in NEUTRAL[name])
            message = f"{path + name} is not supported here: leave it out{allowed}"
            raise Refusal(400, message, param=path + name, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Whether they are equal and both or neither is a boolean: in Python True equals 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _extras(body: Object, path: str) -> Iterator[tuple[str, str, object, list[str]]]:
    known = [path + name for name in type(body).model_fields]
    for name, value in (body.model_extra or {}).items():
        yield path, name, value, known
    for name in type(body).model_fields:
        below = getattr(body, name)
        for index, one in enumerate(below if isinstance(below, list) else [below]):
            if isinstance(one, Object):
                yield from _extras(one, f"{path}{name}[{index}]." if one is not below else f"{path}{name}.")
