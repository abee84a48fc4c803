"""Run uvicorn on a socket in a thread; the main thread handles signals."""

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp

from ladder_jax.errors import UserError

BACKLOG = 2048
GRACE = 5  # seconds to send finished answers before the shutdown
KEEP_ALIVE = 75  # seconds; longer than clients' time-outs, so that none sends while we close the connection
POLL = 0.2  # seconds


def bind(host: str, port: int) -> socket.socket:
    """Binds the port (0: any free one), without listening yet. Raises UserError if it cannot be bound."""
    if not 0 <= port < 2**16:
        raise UserError(f"a port is from 0 to 65535, not {port}")
    sock = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock:
            sock.close()
        reason = error.strerror if isinstance(error, OSError) else "this is no host's name"
        raise UserError(f"cannot listen at {host}, port {port}: {reason}") from None
    return sock


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(app: ASGIApp, sock: socket.socket) -> Iterator[threading.Thread]:
    """Serves within the block. At its end, waits until answers in progress are sent, and closes the socket.

    Yields the serving thread.
    """
    import uvicorn

    from ladder_jax.serve import connections

    try:
        sock.listen(BACKLOG)
    except OSError as error:  # another process took the port in the meantime
        raise UserError(f"cannot listen at {url(sock)}: {error.strerror}") from None
    # In a thread, uvicorn installs no signal handlers. It logs only the server's errors, not the clients'.
    logging = dict(log_config=None, log_level="error", access_log=False, server_header=False)
    timeouts = dict(timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE)
    http = connections.protocol(most=connections.allowed())
    # Never uvloop, if it is there: it reads as much as it likes into a buffer of its own.
    settings = uvicorn.Config(app, **logging, **timeouts, http=http, loop="asyncio", lifespan="off", ws="none")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs=dict(sockets=[sock]), name="ladder_jax http", daemon=True)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield thread
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


def catch_signals() -> queue.SimpleQueue[int]:
    """A queue that receives the number of the first SIGTERM or SIGINT. A second one ends the process at once."""
    signals = queue.SimpleQueue()  # its `put` is safe in a signal handler
    numbers = (signal.SIGTERM, signal.SIGINT)

    def handle(number: int, _: object) -> None:
        for signum in numbers:
            signal.signal(signum, signal.SIG_DFL)
        signals.put(number)

    for signum in numbers:
        signal.signal(signum, handle)
    return signals


def wait(signals: queue.SimpleQueue[int], *, unless: Callable[[], bool]) -> None:
    """Waits for a signal, or until `unless` is true."""
    while not unless():
        with contextlib.suppress(queue.Empty):
            signals.get(timeout=POLL)
            return
