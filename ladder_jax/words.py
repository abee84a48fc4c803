"""Lists on the command line, as in `--batch 1,4,16`."""

from ladder_jax.errors import UserError


def words(option: str, text: str) -> tuple[str, ...]:
    """The words of a list separated by commas. Raises UserError for an empty word, and for a
    repeated one.
    """
    parts = tuple(word.strip() for word in text.split(","))
    for word in parts:
        if not word:
            raise UserError(f"--{option} {text!r} has an empty place: write it as in a,b,c")
        if parts.count(word) > 1:
            raise UserError(f"--{option} {text!r} names {word} twice")
    return parts


def positive(option: str, word: str) -> int:
    """`word` as an integer above 0. Raises UserError otherwise."""
    try:
        number = int(word)
    except ValueError:
        raise UserError(f"--{option} must be numbers as in 1,4,16, not {word!r}") from None
    if number < 1:
        raise UserError(f"--{option} must be positive, not {number}")
    return number
