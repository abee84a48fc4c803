"""uvicorn on a socket, in a thread; the main thread handles signals.

uvicorn's `limit_concurrency` counts idle connections too, and then refuses whoever comes. Here
nobody keeps a place by waiting: of the connections that wait for their client, the one that has
waited longest makes room. Nor has uvicorn time-outs for a request's head and for a client that does
not read, or a bound on a body's chunks.
"""

import asyncio
import contextlib
import http
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ladder_jax.errors import UserError
from ladder_jax.files import reason
from ladder_jax.serve.schema import Refusal

BACKLOG = 2048  # connections that wait to be accepted
ACCEPTED = 8  # of them at a time, so that these are counted before others take the last open files
GRACE = 5  # seconds to send finished answers before the shutdown
# seconds; longer than clients' time-outs, so that none sends while we close the connection
KEEP_ALIVE = 75
POLL = 0.2  # seconds
HEAD_SECONDS = 10.0
"""Seconds within which the head of a request must arrive, and the rest of a body that was
refused.
"""
READ_SECONDS = 30.0
"""Seconds within which a client must read something of what was sent to it."""
UNREAD_BYTES = 2**16
"""Held by the system for a client that does not read; what it asks for beyond that is not
computed.
"""
MAX_CONNECTIONS = 1024
"""Simultaneous connections, at most; fewer if the system limits the open files of this process to
fewer.
"""
MAX_CHUNKS = 10_000
"""Chunks of a request's body, at most: each costs as much to parse as a small request's head."""
READ_BYTES = 4096
"""Read and parsed at a time: a few milliseconds' work, after which other connections have their
turn.
"""
RESERVE = 64  # open files for other uses


class _Requests(h11.Connection):
    """With bodies of at most MAX_CHUNKS chunks."""

    chunks = 0

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
        if self.chunks > MAX_CHUNKS:
            raise h11.RemoteProtocolError("too many chunks")
        return event


class Protocol(H11Protocol, asyncio.BufferedProtocol):
    """One connection, of at most `most`."""

    most = MAX_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.conn = _Requests(h11.SERVER)
        self._buffer = bytearray(READ_BYTES)
        # the newest change; when the client last read something
        self._since = self._read = self.loop.time()
        # when the head that is still to come was due to begin
        self._head: float | None = self._since
        self._unread = 0
        # `pause_writing` is called for whatever the system does not take at once, also of a
        # connection that is closing.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.most:
            # this one at least
            waiting = [connection for connection in self.connections if connection._waits]
            min(waiting, key=lambda connection: connection._since)._leave()

    def check_times(self) -> None:
        """End the connection of a client that has owed the rest of a head, or to read its answer,
        for too long.
        """
        now = self.loop.time()
        unread = self.transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._read = now
            self._unread = unread
        if now - self._read > READ_SECONDS:
            self._leave()
        elif (
            self._head is not None
            and now - self._head > HEAD_SECONDS
            and not self.transport.is_closing()
        ):
            if self.conn.our_state is h11.IDLE:
                self._write(
                    Refusal(408, f"the request's head did not come within {HEAD_SECONDS:g} seconds")
                )
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        """Whether the connection waits for its client: to ask, to send the rest of a body, or to
        read.
        """
        return self._is_idle or self.cycle.more_body or self.flow.write_paused

    def _leave(self) -> None:
        """Now, whatever is still to be sent."""
        self.connections.discard(self)
        self.transport.abort()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._since = self.loop.time()
        if not self._is_idle:
            self._head = None
        elif self._head is None:
            self._head = self.loop.time()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._since = self.loop.time()
        super().pause_writing()

    def send_400_response(self, msg: str) -> None:
        """Called for a malformed request, also while its answer is being sent: then no status can
        be sent.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.chunks > MAX_CHUNKS:
                msg = f"the request's body may come in {MAX_CHUNKS} chunks"
            self._write(Refusal(400, msg))
        self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _write(self, refusal: Refusal) -> None:
        """Sends it past h11, which may be within a request that has no end."""
        body = refusal.response().body
        phrase = http.HTTPStatus(refusal.status_code).phrase
        fields = (
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        )
        self.transport.write(
            f"HTTP/1.1 {refusal.status_code} {phrase}\r\n{fields}\r\n\r\n".encode() + body
        )


def max_connections() -> int:
    """The number of connections that this process can hold, up to MAX_CONNECTIONS.

    Raises the process's limit of open files as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Twice as many: a burst of connections is accepted before they are counted.
    wanted = RESERVE + 2 * MAX_CONNECTIONS
    if soft < wanted:
        soft = min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(8, min(MAX_CONNECTIONS, (soft - RESERVE) // 2))


def bind(host: str, port: int) -> socket.socket:
    """Binds the port (0: any free one), without listening yet. Raises UserError if it cannot be
    bound.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"a port is from 0 to 65535, not {port}")
    sock = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        # asyncio lets small messages wait (up to 40 ms for a client's ACK) on a socket that does not
        # name its protocol
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock:
            sock.close()
        raise UserError(f"cannot listen at {host}, port {port}: {reason(error)}") from None
    return sock


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(app: ASGIApp, sock: socket.socket) -> Iterator[threading.Thread]:
    """Serves within the block. At its end, waits until answers in progress are sent, and closes the
    socket.

    Yields the serving thread.
    """
    sock.listen(BACKLOG)

    class Limited(Protocol):
        most = max_connections()

    # In a thread, uvicorn installs no signal handlers. It logs only the server's errors, not the
    # clients'.
    logging = dict(log_config=None, log_level="error", access_log=False, server_header=False)
    timeouts = dict(timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE)
    # Never uvloop, if it is there: it reads as much as it likes into a buffer of its own.
    asked = dict(http=Limited, loop="asyncio", lifespan="off", ws="none", backlog=ACCEPTED)
    settings = uvicorn.Config(app, **logging, **timeouts, **asked)
    server = uvicorn.Server(settings)

    async def check_times() -> None:
        for connection in list(server.server_state.connections):
            connection.check_times()

    settings.callback_notify, settings.timeout_notify = check_times, 0  # every second
    thread = threading.Thread(
        target=server.run, kwargs=dict(sockets=[sock]), name="ladder_jax http", daemon=True
    )
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if server.started:
            sock.listen(BACKLOG)  # asyncio made the queue as short as that
        yield thread
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def catch_signals() -> list[int]:
    """A list that receives the number of the first SIGTERM or SIGINT. A second one ends the process
    at once.
    """
    signals = []
    numbers = (signal.SIGTERM, signal.SIGINT)

    def handle(number: int, _: object) -> None:
        for signum in numbers:
            signal.signal(signum, signal.SIG_DFL)
        signals.append(number)

    for signum in numbers:
        signal.signal(signum, handle)
    return signals


def wait(signals: list[int], *, unless: Callable[[], bool]) -> None:
    """Waits for a signal, or until `unless` is true."""
    while not signals and not unless():
        time.sleep(POLL)
