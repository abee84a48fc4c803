"""The rules that split text into words before byte-pair encoding, by their names in GGUF (tokenizer.ggml.pre).

The patterns are those of the models' original tokenizers; llama.cpp lists their names in src/llama-vocab.cpp. If there
are several, they are applied in order, each to the words that the previous ones produced.
"""

import dataclasses

from ladder_jax.errors import unknown


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


def rule(name: str | None, *, path: str) -> Rule:
    """The rule of that name. None means "default", as in old files. Raises UserError for an unknown name."""
    name = "default" if name is None else name
    if name not in RULES:
        raise unknown(f"tokenizer.ggml.pre in {path!r}:", name, RULES)
    return RULES[name]
