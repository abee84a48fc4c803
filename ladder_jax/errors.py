"""Mistakes of the user's: one line that names what was wrong and what is allowed."""

import difflib
import enum
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The command line prints its one line and exits with status 2."""


def unknown(what: str, name: object, allowed: Iterable[str]) -> UserError:
    """An error for a misspelt `name`, with the nearest match and everything that is allowed."""
    names = list(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {what} {str(name)!r}{hint} (allowed: {', '.join(names)})")


def member(kind: type[enum.Enum], what: str, word: str) -> enum.Enum:
    """The member of `kind` that is written `word`."""
    try:
        return kind(word)
    except ValueError:
        raise unknown(what, word, [one.value for one in kind]) from None
