"""The tokenizer's files that a Source carries into an export: a fixed list, without programs and
foreign files.

Exported Ladder models are opened with trust_remote_code=True. That would also run a program that
the original tokenizer names (`auto_map`). And copying a link would publish the file that it points
to.
"""

import json
import pathlib
from typing import Any

from ladder_jax.data.tokenizer import json_object
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
"""Transformers' class that needs only tokenizer.json, for any model family."""
_FAMILIES = (
    "CodeLlama",
    "Cohere",
    "GPT2",
    "GPTNeoX",
    "Gemma",
    "Llama",
    "Qwen2",
    "Qwen3",
    "PreTrained",
)
CLASSES = {f"{family}Tokenizer{fast}" for family in _FAMILIES for fast in ("", "Fast")} | {
    "TokenizersBackend"
}
"""Transformers' own tokenizer classes."""


def read(folder: pathlib.Path) -> dict[str, bytes]:
    """The contents of those `FILES` that are in `folder`, by name. Raises UserError for links that
    lead out of it.
    """
    files = {name: (folder / name).read_bytes() for name in FILES if has_file(folder, name)}
    if CONFIG in files:
        files[CONFIG] = _without_programs(files[CONFIG], where=folder / CONFIG, fast=MAIN in files)
    return files


def has_file(folder: pathlib.Path, name: str) -> bool:
    """Whether `folder` contains the file `name`. Raises UserError for a link that leads out of the
    folder.

    In the Hugging Face hub's cache, all files are links from `snapshots/REVISION` into `blobs`.
    """
    file, real = folder / name, folder.resolve()
    allowed = [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]
    if file.is_symlink() and not any(file.resolve().is_relative_to(root) for root in allowed):
        raise UserError(
            f"{str(file)!r} leads out of its folder, and an export copies no such file: put a copy there"
        )
    return file.is_file()


def _without_programs(content: bytes, *, where: pathlib.Path, fast: bool) -> bytes:
    """tokenizer_config.json without `auto_map` and unknown classes. fast: whether there is a
    tokenizer.json.
    """
    config = json_object(content, where=where)
    kept: dict[str, Any] = {name: value for name, value in config.items() if name != "auto_map"}
    if "tokenizer_class" in kept and str(kept["tokenizer_class"]) not in CLASSES:
        kept.pop("tokenizer_class")
        kept |= {"tokenizer_class": FAST} if fast else {}
    return (
        content
        if kept == config
        else (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()
    )
