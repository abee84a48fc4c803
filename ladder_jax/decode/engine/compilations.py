"""Counts compiled programs, from jax's own events."""

import functools
import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"  # once a program, compiled or read from jax's cache
_active = threading.local()


class Compilations:
    """Counts the programs that this thread compiles within `with`; `count` adds up over several."""

    def __init__(self):
        self.count = 0

    def __enter__(self) -> "Compilations":
        _listen()
        _active.counter = self
        return self

    def __exit__(self, *_) -> None:
        _active.counter = None


def _count(event, seconds, **_):
    counter = getattr(_active, "counter", None)
    if event == _EVENT and counter is not None:
        counter.count += 1


@functools.cache
def _listen():
    """Once a process: jax calls a listener at every event."""
    jax.monitoring.register_event_duration_secs_listener(_count)
