"""pydantic's errors as one line that names the parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Chat, Completion, Message

# Descriptions of parameters of several types; pydantic has one error for each of the types.
UNIONS = {
    name: field.description
    for kind in (Completion, Chat, Message)
    for name, field in kind.model_fields.items()
    if name in ("prompt", "stop", "content")
}


def refusal(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The first error; for a parameter of several types, an error about its value goes before those about its type."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON (character {error['loc'][-1]}): {error['ctx']['error']}")
    if wrong := [one for one in errors if one["type"] == "value_error"]:
        param = next(str(part) for part in wrong[0]["loc"] if part != "body")
        return Refusal(400, f"{param}: {wrong[0]['ctx']['error']}", param=param)
    path = [part for part in error["loc"] if part != "body"]
    for depth, part in enumerate(path):
        if part in UNIONS and error["type"] != "missing":
            param = _dotted(path[: depth + 1])
            return Refusal(400, f"{param} must be {UNIONS[part]}", param=param)
    if not path:
        half = error["type"] == "string_unicode"
        return Refusal(
            400, "a parameter's name holds half of a surrogate pair" if half else "the body must be a JSON object"
        )
    param = _dotted(path)
    return Refusal(400, f"{param}: {error['msg']}", param=param)


def _dotted(path: Sequence[str | int]) -> str:
    """messages[0].role"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
