"""Made records of a translation's refinement (as of MT-Ladder, arXiv 2406.15741): source, draft, reference, score."""

import random

WORDS = "nil ein zwo tri vier fem sex sep okt nov".split()
LANGUAGES = ("digits", "words")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made(count: int, *, seed: int, length: int = 5) -> list[dict]:
    """Records with drafts from hopeless to nearly right; `score` says how near, 0 to 1. No source comes twice."""
    rng, sources = random.Random(seed), set()
    while len(sources) < count:
        sources.add("".join(rng.choice("0123456789") for _ in range(length)))
    return [record(source, rng) for source in sorted(sources, key=lambda source: rng.random())]


def record(source: str, rng: random.Random) -> dict:
    reference = " ".join(WORDS[int(digit)] for digit in source)
    draft = corrupted(reference, rng, share=rng.random())
    return {
        "source": source,
        "intermediate": draft,
        "reference": reference,
        "languages": "-".join(LANGUAGES),
        "score": score(draft, reference),
        "prompt": f"{source}|{draft}|",
        "completion": reference + "\n",
    }


def corrupted(text: str, rng: random.Random, *, share: float) -> str:
    """`text`, of which about that share of the letters are other ones."""
    return "".join(rng.choice(LETTERS) if c != " " and rng.random() < share else c for c in text)


def score(draft: str, reference: str, order: int = 3) -> float:
    """The mean over n of the F-measure of n-grams of characters, n from 1 to `order` (as chrF, Popovic 2015)."""
    total = 0.0
    for n in range(1, order + 1):
        ours, theirs = (grams(text, n) for text in (draft, reference))
        both = sum(min(count, theirs.get(gram, 0)) for gram, count in ours.items())
        total += 2 * both / max(sum(ours.values()) + sum(theirs.values()), 1)
    return total / order


def grams(text: str, n: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for at in range(len(text) - n + 1):
        found[text[at : at + n]] = found.get(text[at : at + n], 0) + 1
    return found
