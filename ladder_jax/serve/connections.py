"""Limits on the number of connections, and on how long one may wait for its client, so that others can connect.

uvicorn closes connections that are idle between requests. It does not close one that sends nothing, or half a head,
or continues to send a body after its request was refused. What it has received it parses without a pause.
"""

import asyncio
import http
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
MAX_CHUNKS = 10_000
"""Chunks of a request's body, at most: each costs as much to parse as a small request's head."""
_READ = 8192  # bytes that are read and parsed at a time, a few milliseconds' work
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


class _Requests(h11.Connection):
    """h11's, with a pause after each head, and with bodies of at most MAX_CHUNKS."""

    chunks, paused = 0, False

    def next_event(self):
        if self.paused:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks, self.paused = 0, True
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
        if self.chunks > MAX_CHUNKS:
            raise h11.RemoteProtocolError("too many chunks")
        return event


def protocol(*, most: int) -> type[H11Protocol]:
    """uvicorn's protocol with at most `most` connections. One more closes the connection that has waited longest."""

    turns = itertools.count()  # not the loop's clock: that is equal for all connections accepted at once

    class LimitedProtocol(H11Protocol, asyncio.BufferedProtocol):
        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self.conn, self._buffer = _Requests(h11.SERVER), bytearray(_READ)
            self._head_timer, self._turn = None, next(turns)
            open_ = [connection for connection in self.connections if not connection.transport.is_closing()]
            if len(open_) > most:
                waiting = [connection for connection in open_ if connection._is_waiting]
                min(waiting, key=lambda connection: connection._turn).transport.close()  # possibly this one
            self._update_timer()

        def get_buffer(self, sizehint: int) -> bytearray:
            return self._buffer

        def buffer_updated(self, nbytes: int) -> None:
            self.data_received(bytes(self._buffer[:nbytes]))

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def handle_events(self) -> None:
            super().handle_events()
            if self.conn.paused:  # the application's first step, which may refuse the request, comes before its body
                self.conn.paused = False
                self.loop.call_soon(self._go_on)

        def _go_on(self) -> None:
            if not self.transport.is_closing():
                self.handle_events()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._cancel_timer()

        def on_response_complete(self) -> None:
            self._turn = next(turns)
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """Called for a malformed request, also while its answer is being sent: then no status can be sent."""
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                if self.conn.chunks > MAX_CHUNKS:
                    msg = f"the request's body may come in {MAX_CHUNKS} chunks"
                self._write(Refusal(400, msg))
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
                self._write(Refusal(408, message))
            self.transport.close()

        def _write(self, refusal: Refusal) -> None:
            """Sends it past h11, which may be within a request that has no end."""
            body, reason = refusal.response().body, http.HTTPStatus(refusal.status).phrase
            fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
            self.transport.write(f"HTTP/1.1 {refusal.status} {reason}\r\n{fields}\r\n\r\n".encode() + body)

    return LimitedProtocol
