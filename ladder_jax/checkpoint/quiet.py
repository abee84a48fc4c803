"""Silence what Orbax and tensorstore print when a write fails: pages of it would hide our one-line message.

`Store.wait` raises the error itself. Orbax also logs it in several threads, with tracebacks. And each write that Orbax
abandons prints that its exception was never retrieved, that its event loop is closed, or, perhaps only when the process
ends, that a part of it was never awaited.
"""

import logging
import sys
import threading
import warnings

WRITING = "writing."  # the prefix of an unfinished checkpoint's folder; messages of abandoned writes contain it

NEVER_BEGUN = r"coroutine 'async_serialize_from_host\..*' was never awaited"

_LOGGERS = logging.getLogger("absl"), logging.getLogger("asyncio")


class Quiet:
    """From construction until `close()`, drops these messages and no others."""

    def __init__(self):
        self._before = sys.unraisablehook
        sys.unraisablehook = self._hook
        for logger in _LOGGERS:
            logger.addFilter(_not_orbax)
        warnings.filterwarnings("ignore", NEVER_BEGUN, RuntimeWarning)  # stays, for the process's end

    def close(self, *, after: float = 0.0) -> None:
        """after: seconds to wait first, without blocking, as abandoned writes may still be running."""
        if after:
            timer = threading.Timer(after, self.close)
            timer.daemon = True
            timer.start()
            return
        for logger in _LOGGERS:
            logger.removeFilter(_not_orbax)
        if sys.unraisablehook == self._hook:
            sys.unraisablehook = self._before

    def _hook(self, unraisable) -> None:
        value = unraisable.exc_value
        if not (isinstance(value, RuntimeError) and str(value) == "Event loop is closed"):
            self._before(unraisable)


def _not_orbax(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        error = record.exc_info[1] if record.exc_info else None  # the path may stand in its text alone
        return f"/{WRITING}" not in f"{record.getMessage()} {error}"
    return "orbax" not in record.pathname
