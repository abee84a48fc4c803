"""Turn pydantic's errors into one line that names the wrong parameter."""

from collections.abc import Mapping, Sequence
from typing import Any

from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.schema import Chat, Completion, Message

# Descriptions of the parameters that may have several types: pydantic reports one error for each type.
UNIONS = {
    name: field.description
    for kind in (Completion, Chat, Message)
    for name, field in kind.model_fields.items()
    if name in ("prompt", "stop", "content")
}


def refusal(errors: Sequence[Mapping[str, Any]]) -> Refusal:
    """The Refusal for the first error. An error about a parameter's value goes before errors about its type."""
    error = errors[0]
    if error["type"] == "json_invalid":
        return Refusal(400, f"the body is not JSON (character {error['loc'][-1]}): {error['ctx']['error']}")
    if value_errors := [each for each in errors if each["type"] == "value_error"]:
        param = next(str(part) for part in value_errors[0]["loc"] if part != "body")
        return Refusal(400, f"{param}: {value_errors[0]['ctx']['error']}", param=param)
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
    """The path as text, such as "messages[0].role"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
