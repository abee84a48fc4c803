"""Silences what Orbax and tensorstore print when a disk refuses: pages that would bury the one line for the user.

The error itself is raised where the save is waited for. In addition Orbax logs it in several threads, with tracebacks,
and each abandoned write reports that its error was never retrieved, or that its event loop is closed.
"""

import logging
import sys
import threading

WRITING = "writing."  # before the name of an incomplete checkpoint's folder; reports of abandoned writes contain it

_LOGGERS = logging.getLogger("absl"), logging.getLogger("asyncio")


class Quiet:
    """Until `close()` neither is printed; everything else is."""

    def __init__(self):
        self._before = sys.unraisablehook
        sys.unraisablehook = self._hook
        for logger in _LOGGERS:
            logger.addFilter(_not_orbax)

    def close(self, *, after: float = 0.0) -> None:
        """after: seconds to wait first, where abandoned writes may still report."""
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
        return f"/{WRITING}" not in record.getMessage()
    return "orbax" not in record.pathname
