"""A text as rows of tokens to measure on."""

import pathlib

import numpy as np

from ladder_jax.data.tokenizer import Tokenizer
from ladder_jax.errors import UserError

CHARACTERS = 32  # of the text's beginning that are read, for each token wanted
SEQUENCE = 1024


def rows_of(path: str, *, tokenizer: Tokenizer, tokens: int, vocab_size: int) -> np.ndarray:
    """The beginning of the text file at `path`, [n, T + 1], whose n x T predicted tokens are about `tokens`.

    T is 1,024, or `tokens` if that is less. Rows overlap in one token, so that each but the text's first is predicted
    once. Raises UserError where the text is shorter than one row, or has tokens that the model does not.
    """
    length = min(SEQUENCE, tokens)
    try:
        with pathlib.Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(CHARACTERS * (tokens + 1))
    except OSError as error:
        raise UserError(f"cannot read --calibration {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"--calibration {path!r} is not UTF-8 text") from None
    found = np.array(tokenizer.encode(text), np.int32)
    if len(found) < length + 1:
        raise UserError(
            f"--calibration {path!r} has {len(found)} tokens; measuring needs at least {length + 1}"
            " (--calibration-tokens N asks for fewer)"
        )
    if found.max() >= vocab_size:
        raise UserError(f"--calibration {path!r} gives the token {found.max()}; the model knows {vocab_size}")
    count = min(tokens, len(found) - 1) // length
    starts = length * np.arange(count)[:, None]
    return found[starts + np.arange(length + 1)[None, :]]
