"""Limits on the number of connections, and on how long one may wait for its client, so that others can connect.

uvicorn closes connections that are idle between requests. It does not close one that sends nothing, or half a head,
or continues to send a body after its request was refused.
"""

import itertools
import os
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ladder_jax.serve.refusal import Refusal

HEAD_SECONDS = 10.0
"""Seconds within which the head of a request must arrive."""
MAX_CONNECTIONS = 1024
"""Simultaneous connections, at most; fewer if the system limits the open files of this process to fewer."""
_RESERVE = 32  # open files for other uses


def allowed() -> int:
    """The number of connections that this process can hold, up to MAX_CONNECTIONS.

    Raises the process's limit of open files as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = _RESERVE + (len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else _RESERVE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < used + 2 * MAX_CONNECTIONS:
        soft = used + 2 * MAX_CONNECTIONS if hard == unlimited else min(hard, used + 2 * MAX_CONNECTIONS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # Half of them: a burst of connections is accepted before they are counted.
    return MAX_CONNECTIONS if soft == unlimited else max(8, min(MAX_CONNECTIONS, (soft - used) // 2))


def protocol(*, most: int) -> type[H11Protocol]:
    """uvicorn's protocol with at most `most` connections. One more closes the connection that has waited longest."""

    turns = itertools.count()  # not the loop's clock: that is equal for all connections accepted at once

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._head_timer, self._turn = None, next(turns)
            open_ = [connection for connection in self.connections if not connection.transport.is_closing()]
            if len(open_) > most:
                waiting = [connection for connection in open_ if connection._is_waiting]
                min(waiting, key=lambda connection: connection._turn).transport.close()  # possibly this one
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._cancel_timer()

        def on_response_complete(self) -> None:
            self._turn = next(turns)
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """Called for a malformed request, also while its answer is being sent: then no status can be sent."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            self.transport.close()
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()

        @property
        def _is_waiting(self) -> bool:
            """Whether the connection waits for its client, with no request in progress."""
            return self.cycle is None or self.cycle.response_complete

        def _update_timer(self) -> None:
            if not self._is_waiting or self.transport.is_closing():
                self._cancel_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_SECONDS, self._time_out)

        def _cancel_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _time_out(self) -> None:
            if not self._is_waiting or self.transport.is_closing():
                return
            if self.conn.our_state is h11.IDLE:
                message = f"the request's head did not come within {HEAD_SECONDS:g} seconds"
                body = Refusal(408, message).response().body
                head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
                self.transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
            self.transport.close()

    return LimitedProtocol
