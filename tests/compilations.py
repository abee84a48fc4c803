"""Counts compiled programs."""

import contextlib

import jax

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
