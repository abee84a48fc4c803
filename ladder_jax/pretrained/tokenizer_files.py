"""A tokenizer's files as a Source carries them into an export: a fixed list, no program, nothing from elsewhere.

An export of a ladder must be opened with trust_remote_code=True. A program that somebody else's tokenizer
names (`auto_map`) would be run with it, and a link would publish whatever it leads to.
"""

import json
import pathlib
from typing import Any

from ladder_jax.errors import UserError

MAIN, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (
    MAIN,
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",  # SentencePiece's own, which tokenizer.json repeats
    "vocab.json",
    "merges.txt",
)
FAST = "PreTrainedTokenizerFast"
"""The class that is all that tokenizer.json says, of any family."""
_FAMILIES = ("CodeLlama", "Cohere", "GPT2", "GPTNeoX", "Gemma", "Llama", "Qwen2", "Qwen3", "PreTrained")
CLASSES = {f"{family}Tokenizer{fast}" for family in _FAMILIES for fast in ("", "Fast")} | {"TokenizersBackend"}
"""Transformers' own."""


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """Those of `FILES` that are in `folder`, by content. Raises UserError for links that lead out of it."""
    found = {name: (folder / name).read_bytes() for name in FILES if is_held(folder, name)}
    if CONFIG in found:
        found[CONFIG] = _without_programs(found[CONFIG], where=folder / CONFIG, fast=MAIN in found)
    return found


def is_held(folder: pathlib.Path, name: str) -> bool:
    """Whether `folder` holds that file. Raises UserError for a link that leads out of it.

    In the cache of the Hugging Face hub all files are links, from `snapshots/REVISION` into `blobs`.
    """
    file, real = folder / name, folder.resolve()
    homes = [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]
    if file.is_symlink() and not any(file.resolve().is_relative_to(home) for home in homes):
        raise UserError(f"{str(file)!r} leads out of its folder, and an export copies no such file: put a copy there")
    return file.is_file()


def _without_programs(content: bytes, *, where: pathlib.Path, fast: bool) -> bytes:
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{str(where)!r} is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise UserError(f"{str(where)!r} must hold a JSON object")
    kept: dict[str, Any] = {name: value for name, value in told.items() if name != "auto_map"}
    if "tokenizer_class" in kept and str(kept["tokenizer_class"]) not in CLASSES:
        kept.pop("tokenizer_class")
        kept |= {"tokenizer_class": FAST} if fast else {}
    return content if kept == told else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
