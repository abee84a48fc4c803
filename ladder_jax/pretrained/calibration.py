"""The calibration texts as rows of tokens."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

CHARACTERS = 32  # to read from the text for each requested token
SEQUENCE = 1024


@dataclasses.dataclass(frozen=True)
class Text:
    """A file. weight: its share of the tokens, relative to the other texts' weights."""

    path: str
    weight: float = 1.0


def parse_text(argument: str) -> Text:
    """The text of an argument FILE or FILE:WEIGHT. Raises UserError for a weight that is not positive."""
    path, colon, weight = argument.rpartition(":")
    try:
        text = Text(path, float(weight)) if colon else Text(argument)
    except ValueError:  # a file's name may have a colon
        return Text(argument)
    if not 0 < text.weight < float("inf"):
        raise UserError(f"--calibration {argument!r}: the weight must be positive, not {weight}")
    return text


def rows_of(
    texts: Sequence[Text],
    *,
    tokenizer: Tokenizer,
    tokens: int,
    vocab_size: int,
    skip: int = 0,
    context: int | None = None,
) -> np.ndarray:
    """Rows of tokens [n, T + 1] from the texts, after their first `skip` tokens; n x T is at most `tokens`.

    skip, tokens: divided among the texts by their weights. context: the longest sequence that the model was trained
    for; None if unknown. T is at most that, 1,024, and the shortest text's share. Consecutive rows share one token, so
    that each token except the first is predicted once. Raises UserError if a text is shorter than one row, or a token
    is not in the model's vocabulary.
    """
    whole = sum(text.weight for text in texts)
    share = lambda count, text: round(count * text.weight / whole)
    length = min(SEQUENCE, context or SEQUENCE, *(max(1, share(tokens, text)) for text in texts))
    rows = []
    for text in texts:
        first, wanted = share(skip, text), max(1, share(tokens, text))
        found = np.array(tokenizer.encode(_read(text.path, tokens=first + wanted + 1)), np.int32)
        if len(found) < first + length + 1:
            raise UserError(
                f"--calibration {text.path!r} has {len(found)} tokens; measuring needs at least {first + length + 1}"
                " (--calibration-tokens N asks for fewer)"
            )
        if found.max() >= vocab_size:
            raise UserError(f"--calibration {text.path!r} gives the token {found.max()}; the model knows {vocab_size}")
        found = found[first:]
        starts = length * np.arange(min(wanted, len(found) - 1) // length)
        rows.append(found[starts[:, None] + np.arange(length + 1)])
    return np.concatenate(rows)


def _read(path: str, *, tokens: int) -> str:
    """As much of the text as has so many tokens in all likelihood."""
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8") as file:
            return file.read(CHARACTERS * tokens)
    except OSError as error:
        raise UserError(f"cannot read --calibration {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--calibration {path!r} is not UTF-8 text") from None
