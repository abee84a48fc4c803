"""Parameters that cannot be honoured: refused by name, unless they are set to what does nothing."""

from collections.abc import Iterator

from ladder_jax.errors import unknown
from ladder_jax.serve.refusal import LONGEST, Refusal
from ladder_jax.serve.schema import Object

# What OpenAI's clients may send, and the values that ask for nothing. A null never does.
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
# These never change an answer.
ACCEPTED = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")


def check(asked: Object) -> None:
    """Raises Refusal for the first parameter, at any depth, that is unknown or asks for what is not there."""
    for path, name, value, known in _extras(asked, ""):
        if name in ACCEPTED or value is None and name in NEUTRAL:
            continue
        if name not in NEUTRAL:
            message = str(unknown("parameter", (path + name)[:LONGEST], known))  # the nearest match takes its time
            raise Refusal(400, message, param=path + name, code="unknown_parameter")
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = "".join(f", or {neutral!r}" for neutral in NEUTRAL[name])
            message = f"{path + name} is not supported here: leave it out{allowed}"
            raise Refusal(400, message, param=path + name, code="unsupported_parameter")


def _same(value: object, neutral: object) -> bool:
    """Python says that True is 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _extras(asked: Object, path: str) -> Iterator[tuple[str, str, object, list[str]]]:
    known = [path + name for name in type(asked).model_fields]
    for name, value in (asked.model_extra or {}).items():
        yield path, name, value, known
    for name in type(asked).model_fields:
        below = getattr(asked, name)
        for index, one in enumerate(below if isinstance(below, list) else [below]):
            if isinstance(one, Object):
                yield from _extras(one, f"{path}{name}[{index}]." if one is not below else f"{path}{name}.")
