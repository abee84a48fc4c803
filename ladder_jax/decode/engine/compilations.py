"""How many programs were compiled in a stretch of work, by jax's own account."""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"  # once a program, whether compiled or read from jax's cache
_active = threading.local()


class Compilations:
    """Counts what this thread compiles within `with`; `count` adds up over several."""

    def __init__(self):
        self.count = 0

    def __enter__(self) -> "Compilations":
        _active.counter = self
        return self

    def __exit__(self, *_) -> None:
        _active.counter = None


def _heard(event: str, seconds: float, **_) -> None:
    counter = getattr(_active, "counter", None)
    if event == _EVENT and counter is not None:
        counter.count += 1


jax.monitoring.register_event_duration_secs_listener(_heard)
