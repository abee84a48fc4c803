"""Convert the tokenizer in a GGUF file to Hugging Face's files.

Both kinds are byte-pair encodings. "gpt2" has a list of merges, in GPT-2's alphabet of bytes, and a
rule that splits text into words (RULES). "llama" is sentencepiece's: it merges the pair whose
result has the highest score.
"""

import dataclasses
import json
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ladder_jax.errors import refused, unknown
from ladder_jax.pretrained.gguf.file import File

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)  # found in a text before it is split
MODELS = ("gpt2", "llama")
SPACE = "\u2581"  # how sentencepiece writes a space


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
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
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


def files(file: File) -> dict[str, bytes]:
    """The contents of tokenizer.json, tokenizer_config.json and, if there is a template,
    chat_template.jinja, by name.

    Raises UserError if there is no tokenizer, one of another kind, or one that contradicts itself.
    """
    model = file.get("tokenizer.ggml.model", str)
    if model not in MODELS:
        raise unknown(f"tokenizer in {file.path!r}:", model, MODELS)
    rule = None
    begins = True
    if model == "gpt2":
        name = file.get("tokenizer.ggml.pre", str, "default")  # old files have none
        if name not in RULES:
            raise unknown(f"tokenizer.ggml.pre in {file.path!r}:", name, RULES)
        rule = RULES[name]
        begins = rule.begins
    begins = file.get("tokenizer.ggml.add_bos_token", bool, begins)
    ends = file.get("tokenizer.ggml.add_eos_token", bool, False)
    with refused(f"{file.path!r}: its tokenizer is not a valid one"):
        pieces = file.get("tokenizer.ggml.tokens", list)
        kinds = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(pieces))
        special = _special(file, pieces)
        if rule:
            made = _gpt2(file, pieces, rule)
        else:
            made = _llama(file, pieces, kinds, special)
        made.add_tokens(
            [
                AddedToken(piece, normalized=False, special=kind != USER_DEFINED)
                for piece, kind in zip(pieces, kinds, strict=True)
                if kind in ADDED
            ]
        )
        if begins or ends:
            names = ["bos_token"] * begins + ["text"] + ["eos_token"] * ends
            made.post_processor = _around(names, special)
    config = {
        **{name: piece for name, (piece, _) in special.items()},
        "add_bos_token": begins,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    described = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    texts = {"tokenizer.json": made.to_str(), "tokenizer_config.json": described}
    template = file.get("tokenizer.chat_template", str)
    if template:
        texts["chat_template.jinja"] = template
    return {name: content.encode() for name, content in texts.items()}


def _special(file: File, pieces: list[str]) -> dict[str, tuple[str, int]]:
    """The special tokens' texts and numbers: {"eos_token": ("</s>", 2), ...}."""
    special = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{theirs}_token_id", int)
        if index is not None:
            special[f"{ours}_token"] = pieces[index], index
    return special


def _gpt2(file: File, pieces: list[str], rule: Rule) -> Tokenizer:
    pairs = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", list, [])]
    made = _byte_pairs(pieces, pairs, ignore_merges=rule.whole_words)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    made.decoder = decoders.ByteLevel()
    return made


def _llama(file: File, pieces: list[str], kinds: list[int], special: dict) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores", list)
    mergeable = {
        piece: score
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind in (NORMAL, UNUSED)
    }
    unk = special.get("unk_token", (None, 0))[0]
    has_bytes = BYTE in kinds
    made = _byte_pairs(
        pieces, merges(mergeable), unk_token=unk, fuse_unk=has_bytes, byte_fallback=has_bytes
    )
    normal = [normalizers.Replace(" ", SPACE)]
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        normal.insert(0, normalizers.Prepend(SPACE))
        parts.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(normal)
    made.decoder = decoders.Sequence(parts)
    return made


def merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose concatenation is a token, by descending score of the result, as in
    sentencepiece.
    """
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in scores and right in scores:
                found.append((-score, cut, left, right))
    found.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in found]


def _byte_pairs(pieces: list[str], pairs: list[tuple[str, str]], **settings: Any) -> Tokenizer:
    indices = {piece: index for index, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(indices, pairs, **settings))


def _around(names: list[str], special: dict[str, tuple[str, int]]) -> processors.TemplateProcessing:
    """Adds tokens around each text. names: of special tokens, and "text" where the text is."""
    part = lambda text, kind: [
        f"{text if name == 'text' else special[name][0]}:{kind}" for name in names
    ]
    tokens = [special[name] for name in names if name != "text"]
    return processors.TemplateProcessing(
        single=part("$A", 0), pair=[*part("$A", 0), *part("$B", 1)], special_tokens=tokens
    )
