"""Refuse unsupported parameters by name, unless their value has no effect."""

from collections.abc import Iterator

from ladder_jax.errors import unknown
from ladder_jax.serve.refusal import MAX_CHARACTERS, Refusal
from ladder_jax.serve.schema import GenerationBody, Object

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


def check(body: GenerationBody) -> None:
    """Raises Refusal for the first parameter, at any depth, that is unknown or not supported."""
    neutral_values = NEUTRAL | {"best_of": (body.n or 1,)}
    for path, name, value, allowed_names in _extras(body, ""):
        if name in ACCEPTED or value is None and name in neutral_values:
            continue
        if name not in neutral_values:
            shortened = (path + name)[:MAX_CHARACTERS]  # finding the nearest match of a long name is slow
            message = str(unknown("parameter", shortened, allowed_names))
            raise Refusal(400, message, param=path + name, code="unknown_parameter")
        if not any(_same(value, neutral) for neutral in neutral_values[name]):
            allowed = "".join(f", or {neutral!r}" for neutral in neutral_values[name])
            message = f"{path + name} is not supported here: leave it out{allowed}"
            raise Refusal(400, message, param=path + name, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Whether the values are equal, and both or neither are booleans: in Python, True equals 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _extras(body: Object, path: str) -> Iterator[tuple[str, str, object, list[str]]]:
    """Yields (path, name, value, allowed names) of each undeclared parameter, at any depth."""
    allowed_names = [path + name for name in type(body).model_fields]
    for name, value in (body.model_extra or {}).items():
        yield path, name, value, allowed_names
    for name in type(body).model_fields:
        value = getattr(body, name)
        for index, item in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(item, Object):
                yield from _extras(item, f"{path}{name}[{index}]." if item is not value else f"{path}{name}.")
