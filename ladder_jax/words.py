"""Lists on the command line, as in `--batch 1,4,16`."""

from ladder_jax.errors import UserError


def words(option: str, text: str) -> tuple[str, ...]:
    """The words between commas; raises UserError for an empty place and for a word that stands there twice."""
    found = tuple(word.strip() for word in text.split(","))
    for word in found:
        if not word:
            raise UserError(f"--{option} {text!r} has an empty place: write it as in a,b,c")
        if found.count(word) > 1:
            raise UserError(f"--{option} {text!r} names {word} twice")
    return found


def positive(option: str, word: str) -> int:
    """`word` as a whole number above 0."""
    try:
        number = int(word)
    except ValueError:
        raise UserError(f"--{option} must be numbers as in 1,4,16, not {word!r}") from None
    if number < 1:
        raise UserError(f"--{option} must be positive, not {number}")
    return number
