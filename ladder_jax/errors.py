"""Errors that the command line prints as one line: a user's mistake, or a failure of the run."""

import contextlib
import difflib
import operator
import os
from collections.abc import Iterable, Iterator

LONGEST = 2000  # characters of a message


class UserError(Exception):
    """Wrong input. The command line prints its one line and exits with status 2."""


class RunFailed(Exception):
    """A failure that is not the user's mistake: a full disk, a loss of NaN. The command line exits
    with status 1.
    """

    status = 1


class Stopped(RunFailed):
    """A signal ended the run, after its state was saved. The exit status is the shell's: 128 + the
    signal's number.
    """

    def __init__(self, message: str, *, signum: int):
        super().__init__(message)
        self.status = 128 + signum


def error_text(error: BaseException) -> str:
    """What an error of another library says, with single spaces for newlines; the name of its type
    if it says nothing.
    """
    return " ".join(str(error).split()) or type(error).__name__


def one_line(text: str) -> str:
    """A message for a terminal: `printable`, with newlines escaped, and cut after LONGEST
    characters.
    """
    return printable(text if len(text) <= LONGEST else f"{text[:LONGEST]}...").replace("\n", "\\n")


def end_process(line: str, *, status: int = RunFailed.status) -> None:
    """Ends the process at once, with this line: from a thread, or a signal's handler, where no
    error would reach the command line.
    """
    os.write(2, f"ladder-jax: {one_line(line)}\n".encode())
    os._exit(status)


def printable(text: str) -> str:
    """`text` with control characters escaped, except newlines.

    Names of files, tensors and models may hold any characters, and a terminal would execute some of
    them.
    """
    return "".join(
        char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
    )


def unknown(what: str, name: object, allowed: Iterable[str]) -> UserError:
    """The error for an unknown `name`. Its message lists the allowed names and suggests the
    nearest.
    """
    names = list(allowed)
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UserError(f"unknown {what} {str(name)!r}{hint} (allowed: {', '.join(names)})")


@contextlib.contextmanager
def needed(what: str, *, extra: str) -> Iterator[None]:
    """Around an import: UserError if a package is missing, `what` (such as "GGUF files need gguf")
    and the command that installs it.
    """
    try:
        yield
    except ImportError:
        raise UserError(f"{what}: pip install 'ladder-jax[{extra}]'") from None


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Turns any error of another library into a UserError of one line, "`what`: reason". A panic
    of `tokenizers`' Rust, whose class cannot be imported, is no Exception.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise UserError(f"{what}: {error_text(error)}") from None
        raise


def whole(what: str, value: object, *, least: int) -> int:
    """`value` as an int. Raises UserError for another type, NumPy's integers excepted, and below
    `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise UserError(f"{what} must be a whole number, not {described(value)}")
    if number < least:
        raise UserError(f"{what} must be at least {least}, not {number}")
    return number


def described(value: object) -> str:
    """Text and numbers as one types them; any other value by its type alone, as it may be large."""
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"
