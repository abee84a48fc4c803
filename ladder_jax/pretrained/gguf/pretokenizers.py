"""How text is split into words before byte-pair encoding, by the name that GGUF gives the rule (tokenizer.ggml.pre).

The patterns are those of the models' own tokenizers; llama.cpp's names for them are in its src/llama-vocab.cpp. Several
are applied one after another, each to what those before it left whole.
"""

import dataclasses

from ladder_jax.errors import unknown


@dataclasses.dataclass(frozen=True)
class Rule:
    """patterns: regular expressions, whose matches are words, as is what lies between them.
    whole_words: a word that is a token is that token, whatever the merges say.
    begins: whether a beginning-of-sequence token is put first, where the file does not say.
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
    """Files that name none are old, and mean "default". Raises UserError for an unknown name."""
    name = "default" if name is None else name
    if name not in RULES:
        raise unknown(f"tokenizer.ggml.pre in {path!r}:", name, RULES)
    return RULES[name]
