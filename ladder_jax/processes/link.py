"""JSON objects, one a line, over a connected socket."""

import json
import socket
import time
from typing import Any

Message = dict[str, Any]

LONGEST = 2**20  # bytes in a line
SENDING = 5.0  # seconds in which a few hundred bytes must go


class Gone(Exception):
    """The other end is no more, or never spoke this language."""


class Link:
    def __init__(self, connected: socket.socket):
        self._socket, self._rest = connected, b""
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Raises Gone."""
        try:
            self._socket.settimeout(SENDING)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone(str(error)) from None

    def read(self) -> list[Message]:
        """What has come, without waiting. Raises Gone once that has been read and nothing more will come."""
        closed = None
        self._socket.setblocking(False)
        while len(self._rest) <= LONGEST:
            try:
                new = self._socket.recv(2**16)
            except BlockingIOError:
                break
            except OSError as error:
                closed = error.strerror or str(error)
                break
            if not new:
                closed = "its connection was closed"
                break
            self._rest += new
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LONGEST:
            raise Gone("it speaks another protocol")
        if closed and not lines:
            raise Gone(closed)
        return [self._parsed(line) for line in lines]

    def finish(self, *, within: float = 1.0) -> None:
        """Close it once the other end has closed too: a close with unread input would drop what was sent."""
        until = time.monotonic() + within
        try:
            self._socket.shutdown(socket.SHUT_WR)
            while (left := until - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(2**16):
                    break
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _parsed(self, line: bytes) -> Message:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Gone("it speaks another protocol")
        return message
