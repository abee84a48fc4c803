"""SIGTERM while a folder is created: an exception that leaves nothing unfinished, and says what there is."""

import pathlib
import signal
import threading

from ladder_jax.errors import Stopped


class Sigterm:
    """Within the block, the first SIGTERM raises Stopped, so that unfinished files are removed.

    While it is held, as at first, it raises later: at `release`, or at the block's end. In other threads than the main
    one, which get no signals, this does nothing.
    """

    def __init__(self, destination: pathlib.Path, *, resumes: bool):
        self._destination, self._resumes = destination, resumes
        self._held, self._received = True, False
        self._catches = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Sigterm":
        if self._catches:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._catches:
            signal.signal(signal.SIGTERM, self._before)
        if kind is None:
            self.release()

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        """Raises Stopped if SIGTERM came meanwhile."""
        self._held = False
        if self._received:
            raise self._stopped()

    def _handle(self, signum: int, _) -> None:
        self._received = True
        if not self._held:
            self._held = True  # another one does not disturb the removal
            raise self._stopped()

    def _stopped(self) -> Stopped:
        done = "was written" if is_written(self._destination) else "was not written"
        goes_on = "; the same command goes on from here" if self._resumes and done == "was not written" else ""
        return Stopped(f"SIGTERM: {str(self._destination)!r} {done}{goes_on}", signum=signal.SIGTERM)


def is_written(destination: pathlib.Path) -> bool:
    return destination.is_dir() and any(destination.iterdir())
