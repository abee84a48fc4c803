"""SIGTERM while a folder is created: an exception that leaves nothing unfinished, and says what there is."""

import os
import pathlib
import signal
import sys
import threading

from ladder_jax.errors import Stopped


class _Received(BaseException):
    """No Exception: those are caught for their own reasons, as in jax's compilation cache."""


class Sigterm:
    """Within the block, the first SIGTERM raises, so that unfinished files are removed; the block's end raises Stopped.

    While it is held, as at first, it raises later: at `release`, or at the block's end. In other threads than the main
    one, which get no signals, this does nothing.
    """

    def __init__(self, destination: pathlib.Path, *, resumes: bool):
        self._destination, self._resumes = destination, resumes
        self._held, self._received = True, False
        self._catches = threading.current_thread() is threading.main_thread()
        self._again: threading.Timer | None = None

    def __enter__(self) -> "Sigterm":
        if self._catches:
            self._before = signal.signal(signal.SIGTERM, self._handle), sys.unraisablehook
            sys.unraisablehook = self._ignored
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        if self._catches:
            if self._again is not None:
                self._again.cancel()
            signal.signal(signal.SIGTERM, self._before[0])
            sys.unraisablehook = self._before[1]
        if self._received and not isinstance(error, Stopped):
            # In compiled code, as in np.fromfile, what was raised becomes a SystemError.
            raise self._stopped() from (None if isinstance(error, _Received) else error)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        """Raises if SIGTERM came meanwhile."""
        self._held = False
        if self._received:
            raise _Received

    def _handle(self, signum: int, _) -> None:
        self._received = True
        if not self._held:
            self._held = True  # another one does not disturb the removal
            raise _Received

    def _ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """What is raised in a callback, as in jax's of the garbage collector, is ignored: raised again, elsewhere."""
        if not isinstance(unraisable.exc_value, _Received):
            self._before[1](unraisable)
            return
        self._held = False
        self._again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        self._again.start()

    def _stopped(self) -> Stopped:
        done = "was written" if is_written(self._destination) else "was not written"
        goes_on = "; the same command goes on from here" if self._resumes and done == "was not written" else ""
        return Stopped(f"SIGTERM: {str(self._destination)!r} {done}{goes_on}", signum=signal.SIGTERM)


def is_written(destination: pathlib.Path) -> bool:
    return destination.is_dir() and any(destination.iterdir())
