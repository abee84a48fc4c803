"""Whether a written answer is the right one, as lm-evaluation-harness's task gsm8k finds out.

Its patterns (lm_eval/tasks/gsm8k/gsm8k.yaml, version 3.0), the filters regex and take_first (lm_eval/filters) and
the metric exact_match (lm_eval/api/metrics.py).
"""

import re

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
NONE = "[invalid]"


def strict(text: str) -> str:
    """The first number that stands after "#### "."""
    found = STRICT.findall(text)
    return found[0].strip() if found else NONE


def flexible(text: str) -> str:
    """The last number, of those with a dollar sign, a comma or a point too."""
    found = FLEXIBLE.findall(text)
    return next(part for part in found[-1] if part).strip() if found else NONE


def matches(found: str, answer: str) -> bool:
    """Equal but for commas, dollar signs, all up to the last "#### ", a point at the end, and capitals."""
    return _bare(found) == _bare(answer)


def _bare(text: str) -> str:
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()
