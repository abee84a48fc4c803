"""Limits on connections that wait for their client: how long, and how many, so that other clients can connect.

uvicorn times out connections that are idle between requests, but not one that sends nothing, or half a head, or goes on
sending a body after the request was refused.
"""

import itertools
import os
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ladder_jax.serve.refusal import Refusal

HEAD_SECONDS = 10.0
"""Seconds within which the head of a request must have arrived."""
MOST = 1024
"""The most simultaneous connections; fewer where the system limits this process to fewer open files."""
_RESERVE = 32  # open files left for other uses


def allowed() -> int:
    """How many connections this process can hold, at most MOST. Raises its limit of open files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _RESERVE + (len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else _RESERVE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < used + 2 * MOST:
        soft = used + 2 * MOST if hard == unlimited else min(hard, used + 2 * MOST)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Half of them: a burst of connections is accepted before they are counted.
    return MOST if soft == unlimited else max(8, min(MOST, (soft - used) // 2))


def protocol(*, most: int) -> type[H11Protocol]:
    """uvicorn's protocol, with at most `most` connections: beyond them, the one that has waited longest is closed."""

    turns = itertools.count()  # the loop's clock is the same for all connections that it accepts at once

    class Patient(H11Protocol):
        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._late, self._turn = None, next(turns)
            open_ = [one for one in self.connections if not one.transport.is_closing()]
            if len(open_) > most:
                waiting = [one for one in open_ if one._waits]
                min(waiting, key=lambda one: one._turn).transport.close()  # possibly this one
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._give_up_watching()

        def on_response_complete(self) -> None:
            self._turn = next(turns)
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """Also where the malformed part is a body for which the answer has not waited."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            self.transport.close()
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        @property
        def _waits(self) -> bool:
            """Whether it waits for its client, with no request in progress."""
            return self.cycle is None or self.cycle.response_complete

        def _watch(self) -> None:
            if not self._waits or self.transport.is_closing():
                self._give_up_watching()
            elif self._late is None:
                self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

        def _give_up_watching(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_late(self) -> None:
            if not self._waits or self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:
                message = f"the request's head did not come within {HEAD_SECONDS:g} seconds"
                body = Refusal(408, message).response().body
                head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
                self.transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return Patient
