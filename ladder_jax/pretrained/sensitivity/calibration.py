"""The calibration text as rows of tokens."""

import pathlib

import numpy as np

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

CHARACTERS = 32  # to read from the text for each requested token
SEQUENCE = 1024


def rows_of(path: str, *, tokenizer: Tokenizer, tokens: int, vocab_size: int) -> np.ndarray:
    """Rows of tokens [n, T + 1] from the beginning of the text file at `path`; n x T is at most `tokens`.

    T is 1,024, or `tokens` if that is less. Consecutive rows share one token, so that each token except the first is
    predicted once. Raises UserError if the text is shorter than one row, or a token is not in the model's vocabulary.
    """
    length = min(SEQUENCE, tokens)
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(CHARACTERS * (tokens + 1))
    except OSError as error:
        raise UserError(f"cannot read --calibration {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--calibration {path!r} is not UTF-8 text") from None
    row_tokens = np.array(tokenizer.encode(text), np.int32)
    if len(row_tokens) < length + 1:
        raise UserError(
            f"--calibration {path!r} has {len(row_tokens)} tokens; measuring needs at least {length + 1}"
            " (--calibration-tokens N asks for fewer)"
        )
    if row_tokens.max() >= vocab_size:
        raise UserError(f"--calibration {path!r} gives the token {row_tokens.max()}; the model knows {vocab_size}")
    count = min(tokens, len(row_tokens) - 1) // length
    starts = length * np.arange(count)[:, None]
    return row_tokens[starts + np.arange(length + 1)[None, :]]
