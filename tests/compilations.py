"""Programs that are compiled: how many, and which."""

import contextlib
import hashlib
from unittest import mock

import jax
import pytest

from ladder_jax.parallel import Compiled

# jax's event, once a program: compiled or read from its cache
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted():
    """A list that grows by one with each program that is compiled within the block."""
    compiled = []

    def note(event, *_, **__):
        if event == COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def digest(function, arguments):
    """Of the StableHLO that is lowered for them."""
    return hashlib.sha256(function.lower(*arguments).as_text().encode()).hexdigest()


class Lowered(Exception):
    """Ends a command where it would compile."""


def would_compile(run, *arguments):
    """The digest of the first program that it would compile."""

    def compile(self, *arguments):
        raise Lowered(digest(self, arguments))

    with mock.patch.object(Compiled, "compile", compile), pytest.raises(Lowered) as found:
        run(*arguments)
    return str(found.value)
