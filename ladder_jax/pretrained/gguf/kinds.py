"""Check the types of those settings of a GGUF file that we read: the format allows any type for any setting."""

from collections.abc import Mapping
from typing import Any

from ladder_jax.errors import UserError

SCALARS = {
    "general.architecture": str,
    "split.count": int,
    ".context_length": int,
    "tokenizer.chat_template": str,
    "tokenizer.ggml.model": str,
    "tokenizer.ggml.pre": str,
    "tokenizer.ggml.add_bos_token": bool,
    "tokenizer.ggml.add_eos_token": bool,
    "tokenizer.ggml.add_space_prefix": bool,
    "_token_id": int,
}
"""The type by the end of a setting's name."""
LISTS = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.scores": (int, float),
}


def check(fields: Mapping[str, Any], *, path: str) -> None:
    """Raises UserError for the first setting of another type."""
    for name, value in fields.items():
        for kind in (kind for ending, kind in SCALARS.items() if name.endswith(ending)):
            if not isinstance(value, kind) or kind is int and isinstance(value, bool):
                raise UserError(f"{path!r}: {name} must be of type {kind.__name__}, not {value!r}"[:300])
        if name in LISTS and not (isinstance(value, list) and all(isinstance(item, LISTS[name]) for item in value)):
            raise UserError(f"{path!r}: {name} is not a list of {_names(LISTS[name])}")


def _names(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
