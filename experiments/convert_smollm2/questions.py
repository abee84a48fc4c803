"""A multiple-choice task from any text: which of four continuations is the paragraph's own?"""

import json
import pathlib
import random

from ladder_jax import files
from ladder_jax.errors import UserError

CHOICES = 4


def write(text: str, *, count: int, context: int, continuation: int, file: pathlib.Path) -> None:
    """`count` questions as JSON lines that `ladder-jax evaluate --multiple-choice` reads, the same for the same text.

    The prompt is a paragraph's first `context` words; the right choice its next `continuation` words, the wrong ones
    those words of other paragraphs that begin with another word. A paragraph is a line, headings (" = Title = ") not
    among them. Raises UserError where there are too few.
    """
    lines = [line.split() for line in text.splitlines()]
    long = [words for words in lines if len(words) >= context + continuation and words[0] != "="]
    if len(long) < max(count, CHOICES):
        raise UserError(
            f"the held-out text has {len(long)} paragraphs of {context + continuation} words or more;"
            f" the continuation task needs {max(count, CHOICES)} (data.validation_fraction, or a longer text)"
        )
    chance, rows = random.Random(0), []
    own = lambda words: " ".join(words[context : context + continuation])
    for words in long[:count]:
        others = sorted({own(other) for other in long if other[context] != words[context]})
        if len(others) < CHOICES - 1:
            raise UserError("the held-out text's paragraphs are too much alike for the continuation task")
        choices = [own(words), *chance.sample(others, CHOICES - 1)]
        chance.shuffle(choices)
        rows.append({"context": " ".join(words[:context]), "choices": choices, "answer": choices.index(own(words))})
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.write_atomically(str(file), lambda path: pathlib.Path(path).write_text(content, encoding="utf-8"))
