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


def rows_of_texts(
    texts: Sequence[Text],
    *,
    tokenizer: Tokenizer,
    tokens: int,
    vocab_size: int,
    skip: int = 0,
    context: int | None = None,
) -> np.ndarray:
    """`rows_of` all texts, by their weights: `skip` and `tokens` are divided among them.

    context: the longest sequence that the model was trained for, which no row exceeds; None if unknown. All rows have
    the length of the shortest text's. Raises UserError as `rows_of` does.
    """
    whole = sum(text.weight for text in texts)
    share = lambda count, text: round(count * text.weight / whole)
    length = min(SEQUENCE, context or SEQUENCE, *(max(1, share(tokens, text)) for text in texts))
    settings = dict(tokenizer=tokenizer, vocab_size=vocab_size, length=length)
    rows = [
        rows_of(text.path, tokens=max(1, share(tokens, text)), skip=share(skip, text), **settings) for text in texts
    ]
    return np.concatenate(rows)


def rows_of(
    path: str, *, tokenizer: Tokenizer, tokens: int, vocab_size: int, skip: int = 0, length: int | None = None
) -> np.ndarray:
    """Rows of tokens [n, T + 1] from the text file at `path`, after its first `skip` tokens; n x T is at most `tokens`.

    T is `length`, by default 1,024, or `tokens` if that is less. Consecutive rows share one token, so that each token
    except the first is predicted once. Raises UserError if the text is shorter than one row, or a token is not in the
    model's vocabulary.
    """
    length = min(SEQUENCE, tokens) if length is None else length
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(CHARACTERS * (skip + tokens + 1))
    except OSError as error:
        raise UserError(f"cannot read --calibration {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--calibration {path!r} is not UTF-8 text") from None
    row_tokens = np.array(tokenizer.encode(text), np.int32)
    if len(row_tokens) < skip + length + 1:
        raise UserError(
            f"--calibration {path!r} has {len(row_tokens)} tokens; measuring needs at least {skip + length + 1}"
            " (--calibration-tokens N asks for fewer)"
        )
    if row_tokens.max() >= vocab_size:
        raise UserError(f"--calibration {path!r} gives the token {row_tokens.max()}; the model knows {vocab_size}")
    row_tokens = row_tokens[skip:]
    count = min(tokens, len(row_tokens) - 1) // length
    starts = length * np.arange(count)[:, None]
    return row_tokens[starts + np.arange(length + 1)[None, :]]
