"""Shut a server down gracefully: finish the requests in progress, refuse new ones."""

import threading
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from ladder_jax.serve.refusal import Refusal

POLL = 0.05  # seconds


class Drain:
    """Counts the requests in progress. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._active = 0
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    def begin(self) -> int:
        """Refuses new requests from now on. Returns the number in progress."""
        with self._lock:
            self._draining = True
            return self._active

    def wait(self, seconds: float, *, unless: Callable[[], bool]) -> None:
        """Waits until no request is in progress, for at most `seconds`, or until `unless` is true."""
        deadline = time.monotonic() + seconds
        while self._active and time.monotonic() < deadline and not unless():
            time.sleep(POLL)

    def guard(self, app: ASGIApp, *, paths: tuple[str, ...]) -> ASGIApp:
        """Middleware: counts the requests to `paths`, and refuses them while draining."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] not in paths:
                return await app(scope, receive, send)
            with self._lock:  # after `begin`, the count can only fall
                if accepted := not self._draining:
                    self._active += 1
            if not accepted:
                headers = {"Retry-After": "5", "Connection": "close"}
                refusal = Refusal(503, "the server is shutting down; try again", code="draining", headers=headers)
                return await refusal.response()(scope, receive, send)
            try:
                await app(scope, receive, send)
            finally:
                with self._lock:
                    self._active -= 1

        return guarded
