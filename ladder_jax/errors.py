"""What a user is told in one line: a mistake, with what is allowed; or what stopped a run."""

import difflib
import enum
from collections.abc import Iterable


class UserError(Exception):
    """Wrong input. The command line prints its one line and exits with status 2."""


class RunFailed(Exception):
    """What another command line would not have prevented: a full disk, a loss that is no number. One line, status 1."""

    status = 1


class Stopped(RunFailed):
    """A signal asked for the end, and what there was is saved. The status is the shell's: 128 + the signal's number."""

    def __init__(self, message: str, *, signum: int):
        super().__init__(message)
        self.status = 128 + signum


def printable(text: str) -> str:
    """With escapes for what a terminal would obey: names of files, tensors and models may hold any character."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def unknown(what: str, name: object, allowed: Iterable[str]) -> UserError:
    """An error for a misspelt `name`, with the nearest match and everything that is allowed."""
    names = list(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {what} {str(name)!r}{hint} (allowed: {', '.join(names)})")


def member[E: enum.Enum](kind: type[E], what: str, word: E | str) -> E:
    """The member of `kind` that is written `word`; a member is returned unchanged."""
    try:
        return kind(word)
    except ValueError:
        raise unknown(what, word, [one.value for one in kind]) from None
