"""A worker, as its parent sees it: started, listened to, ended."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys

from ladder_jax.processes.link import Gone, Link
from ladder_jax.processes.members import Cause, End
from ladder_jax.processes.noise import Noise
from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place

VARIABLE = "LADDER_JAX_WORKER"  # tells a worker what it is
ENDING = 5.0  # seconds that a killed worker may take


class Child:
    """Runs `command`, which calls `attached`, as the worker at `place`.

    Python's own prints go where the parent's go, a terminal or not; what native code prints comes through a pipe.
    beats, doing: the worker's own word of how far it is; line: of the error that it ended with; trace: of its crash.
    """

    def __init__(self, place: Place, *, command: list[str], patience: Patience):
        ours, theirs = socket.socketpair()
        self._noise_fd, printed = os.pipe()
        os.set_blocking(self._noise_fd, False)
        told = {"place": dataclasses.asdict(place), "patience": dataclasses.asdict(patience)}
        streams = {"stdout": os.dup(1), "stderr": os.dup(2)}
        told |= {"link": theirs.fileno(), **streams}
        self._process = subprocess.Popen(
            command,
            env={**os.environ, VARIABLE: json.dumps(told)},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(theirs.fileno(), *streams.values()),
            process_group=0,  # Ctrl-C comes to the parent, which passes it on
        )
        for fd in (printed, *streams.values()):
            os.close(fd)
        theirs.close()
        self._link: Link | None = Link(ours)
        self._noise = Noise()
        self.beats, self.doing, self.line, self.trace = 0, "starting", "", ""

    @property
    def sources(self) -> list[Link | int]:
        """What is worth waiting for."""
        return [source for source in (self._link, self._noise_fd) if source is not None]

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def poll(self) -> End | None:
        """How it ended, if it has; hears and prints what there is."""
        status = self._process.poll()  # before all is read: nothing comes after the end
        self._hear()
        self._print()
        return None if status is None else self._end(status)

    def kill(self) -> None:
        """At once: it may be in a collective that never returns."""
        self._process.kill()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:  # in the kernel, with a device or a file system that does not answer
            return
        self._hear()
        self._print()

    def confess(self) -> str:
        """What it said in its last moments, to be shown where nobody else is the cause."""
        return self._noise.held + self.trace

    def _end(self, status: int) -> End:
        if self.line:
            return End(Cause.FAILED if status < 128 else Cause.DONE, f"ended: {self.line}", status)
        if self.trace:
            return End(Cause.CRASHED, f"crashed: {self.trace.strip().splitlines()[-1][:300]}", 1)
        if status == 0:
            return End(Cause.DONE, "finished", 0)
        if status == -signal.SIGABRT:
            return End(Cause.CRASHED, "was aborted by native code", 1)
        if status < 0:
            memory = " (out of memory?)" if status == -signal.SIGKILL else ""
            return End(Cause.LOST, f"was ended by {signal.Signals(-status).name}{memory}", 1)
        return End(Cause.FAILED, f"ended with status {status}", status)

    def _hear(self) -> None:
        if self._link is None:
            return
        try:
            for message in self._link.read():
                self.line, self.trace = message.get("line", self.line), message.get("trace", self.trace)
                self.beats, self.doing = message.get("beats", self.beats), message.get("doing", self.doing)
        except Gone:
            self._link = None

    def _print(self) -> None:
        text, end = b"", False
        while self._noise_fd is not None:
            try:
                new = os.read(self._noise_fd, 2**16)
            except BlockingIOError:
                break
            if not new:
                os.close(self._noise_fd)
                self._noise_fd, end = None, True
            text += new
        if text or end:
            sys.stderr.write(self._noise.passed(text.decode(errors="replace"), end=end))
            sys.stderr.flush()
