"""Of which type the settings of a GGUF file must be that are read by name: any file may say anything."""

from collections.abc import Mapping
from typing import Any

from ladder_jax.errors import UserError

ONE = {
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
"""By how a name ends."""
LISTS = {
    "tokenizer.ggml.tokens": str,
    "tokenizer.ggml.token_type": int,
    "tokenizer.ggml.merges": str,
    "tokenizer.ggml.scores": (int, float),
}


def check(fields: Mapping[str, Any], *, path: str) -> None:
    """Raises UserError for the first setting that is of another type."""
    for name, value in fields.items():
        for kind in (kind for ending, kind in ONE.items() if name.endswith(ending)):
            if not isinstance(value, kind) or kind is int and isinstance(value, bool):
                raise UserError(f"{path!r}: {name} must be of type {kind.__name__}, not {value!r}"[:300])
        if name in LISTS and not (isinstance(value, list) and all(isinstance(one, LISTS[name]) for one in value)):
            raise UserError(f"{path!r}: {name} is not the list that it should be")
