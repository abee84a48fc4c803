"""Convert the tokenizer in a GGUF file to Hugging Face's files.

Both kinds are byte-pair encodings. "gpt2" has a list of merges, in GPT-2's alphabet of bytes, and a rule that splits
text into words (RULES). "llama" is sentencepiece's: it merges the pair whose result has the highest score.
"""

import dataclasses
import json
from typing import Any

from ladder_jax.errors import UserError, unknown
from ladder_jax.pretrained.gguf.file import File

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MODELS = ("gpt2", "llama")
SPACE = "\u2581"  # how sentencepiece writes a space
MAX_CHARACTERS = 512  # of a merged token: time grows with their square; sentencepiece's have at most 16


@dataclasses.dataclass(frozen=True)
class Rule:
    """patterns: regular expressions. Each match is a word, and so is the text between two matches.
    whole_words: a word that is itself a token becomes that token, regardless of the merges.
    begins: whether to add a beginning-of-sequence token, unless the file has a setting for that.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

DEFAULT = Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
GPT2 = Rule((_GPT2,))
DIGITS = Rule((r"\p{N}", _GPT2))
LLAMA3 = Rule((rf"{_ENDINGS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACE}",), whole_words=True, begins=True)
QWEN2 = Rule((rf"{_ENDINGS}|\p{{N}}|{_SIGNS_AND_SPACE}",))
TEKKEN = Rule(
    (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    whole_words=True,
    begins=True,
)

RULES = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "olmo": GPT2,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "codeshell": DIGITS,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "falcon3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
}


def rule_of(name: str | None, *, path: str) -> Rule:
    """The rule of that name. None means "default", as in old files. Raises UserError for an unknown name."""
    name = "default" if name is None else name
    if name not in RULES:
        raise unknown(f"tokenizer.ggml.pre in {path!r}:", name, RULES)
    return RULES[name]


def files(file: File, *, vocab_size: int) -> dict[str, bytes]:
    """The contents of tokenizer.json, tokenizer_config.json and, if there is a template, chat_template.jinja, by name.

    Raises UserError if there is no tokenizer, one of another kind, or one with more tokens than `vocab_size`.
    """
    model, pre = (file.get(f"tokenizer.ggml.{name}", str) for name in ("model", "pre"))
    if model not in MODELS:
        raise unknown(f"tokenizer in {file.path!r}:", model, MODELS)
    pieces = file.items("tokenizer.ggml.tokens", str)
    kinds = file.items("tokenizer.ggml.token_type", int) or [NORMAL] * len(pieces)
    if not pieces or len(set(pieces)) != len(pieces) or len(kinds) != len(pieces):
        raise UserError(f"{file.path!r}: its tokenizer has no tokens, repeated tokens, or tokens without a type")
    if len(pieces) > vocab_size:
        raise UserError(f"{file.path!r}: its tokenizer has {len(pieces)} tokens, its model {vocab_size}")
    special = _special(file, pieces)
    rule = rule_of(pre, path=file.path) if model == "gpt2" else None
    described = _gpt2(file, pieces, rule) if rule else _llama(file, pieces, kinds, special)
    begins = file.get("tokenizer.ggml.add_bos_token", bool, rule.begins if rule else True)
    ends = file.get("tokenizer.ggml.add_eos_token", bool, False)
    described |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, piece, kind) for i, (piece, kind) in enumerate(zip(pieces, kinds)) if _is_added(kind)
        ],
        "post_processor": _around(special, begins=begins, ends=ends, path=file.path),
    }
    text = json.dumps(described, ensure_ascii=False)
    _check_loads(text, path=file.path)
    config = {name: piece for name, (piece, _) in special.items()}
    config |= {
        "add_bos_token": begins,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    texts = {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n"}
    if template := file.get("tokenizer.chat_template", str):
        texts["chat_template.jinja"] = template
    return {name: content.encode() for name, content in texts.items()}


def _special(file: File, pieces: list[str]) -> dict[str, tuple[str, int]]:
    """The special tokens' texts and numbers: {"eos_token": ("</s>", 2), ...}."""
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{theirs}_token_id", int)
        if index is None:
            continue
        if not 0 <= index < len(pieces):
            raise UserError(f"{file.path!r}: tokenizer.ggml.{theirs}_token_id={index} is none of {len(pieces)} tokens")
        special[f"{ours}_token"] = (pieces[index], index)
    return special


def _gpt2(file: File, pieces: list[str], rule: Rule) -> dict[str, Any]:
    pairs = [merge.split(" ") for merge in file.items("tokenizer.ggml.merges", str)]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"{file.path!r}: its tokenizer's merges are not pairs")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, level]},
        "decoder": {**level, "use_regex": True},
        "model": _bpe(pieces, pairs, unk=None, byte_fallback=False, ignore_merges=rule.whole_words),
    }


def _llama(file: File, pieces: list[str], kinds: list[int], special: dict) -> dict[str, Any]:
    scores = file.items("tokenizer.ggml.scores", int, float)
    if len(scores) != len(pieces):
        raise UserError(f"{file.path!r}: its tokenizer does not have one score for each token")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    first = [{"type": "Prepend", "prepend": SPACE}] if file.get("tokenizer.ggml.add_space_prefix", bool, True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if first else []
    mergeable = {piece: score for piece, score, kind in zip(pieces, scores, kinds) if kind in (NORMAL, UNUSED)}
    if (longest := max(map(len, mergeable), default=0)) > MAX_CHARACTERS:
        raise UserError(f"{file.path!r}: its tokenizer has a token of {longest} characters (at most {MAX_CHARACTERS})")
    unk = special.get("unk_token", (None, 0))[0]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": _bpe(pieces, merges(mergeable), unk=unk, byte_fallback=BYTE in kinds, ignore_merges=False),
    }


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, by descending score of the result, as in sentencepiece."""
    pairs = (
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    )
    return [(left, right) for _, left, right in sorted(pairs, key=lambda pair: (pair[0], len(pair[1])))]


def _bpe(
    pieces: list[str], pairs: list, *, unk: str | None, byte_fallback: bool, ignore_merges: bool
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        "merges": pairs,
    }


def _is_added(kind: int) -> bool:
    return kind in (UNKNOWN, CONTROL, USER_DEFINED)


def _added(index: int, piece: str, kind: int) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": piece, **plain, "special": kind != USER_DEFINED}


def _around(special: dict[str, tuple[str, int]], *, begins: bool, ends: bool, path: str) -> dict[str, Any] | None:
    """The post-processor that adds the begin and end tokens to each text; None if there are none."""
    names = [*(["bos_token"] if begins else []), "text", *(["eos_token"] if ends else [])]
    if len(names) == 1:
        return None
    if missing := [name for name in names if name != "text" and name not in special]:
        raise UserError(f"{path!r}: its tokenizer adds a {missing[0]} to each text, but does not define it")
    piece = lambda name, type_id: {"SpecialToken": {"id": special[name][0], "type_id": type_id}}
    sequence = lambda label, type_id: {"Sequence": {"id": label, "type_id": type_id}}
    part = lambda label, type_id: [
        sequence(label, type_id) if name == "text" else piece(name, type_id) for name in names
    ]
    tokens = {
        special[name][0]: {"id": special[name][0], "ids": [special[name][1]], "tokens": [special[name][0]]}
        for name in names
        if name != "text"
    }
    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": [*part("A", 0), *part("B", 1)],
        "special_tokens": tokens,
    }


def _check_loads(text: str, *, path: str) -> None:
    """Raises UserError if the library `tokenizers` cannot load `text`."""
    import tokenizers

    try:
        tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises plain Exceptions
        raise UserError(f"{path!r}: its tokenizer is not a valid one: {' '.join(str(error).split())[:200]}") from None
