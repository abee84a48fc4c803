"""SIGTERM (preemption) and SIGINT: the first asks for an orderly end, the second ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class Asked:
    """Whether a signal asked for the end, and which. `noted`: here, of which several processes may not know yet."""

    which: signal.Signals | None = None
    noted: signal.Signals | None = None

    @property
    def now(self) -> bool:
        """Whether to leave what is being done between two steps. Several processes must not part there: never."""
        return jax.process_count() == 1 and self.which is not None

    def at(self, step: int) -> bool:
        """Whether to end after `step`. On several processes all of them give the same answer for the same step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.which = self.noted or signal.SIGTERM
        return self.which is not None


@contextlib.contextmanager
def caught() -> Iterator[Asked]:
    """While it is open, the first signal is only noted; outside of the main thread none is caught.

    With several processes SIGTERM belongs to jax's own notifier, which tells all of them (see `Asked.at`), and SIGINT
    becomes one.
    """
    asked, several = Asked(), jax.process_count() > 1

    def handle(signum: int, _) -> None:
        if asked.noted is not None:
            os.write(2, f"ladder-jax: {signal.Signals(signum).name} again: ending at once\n".encode())
            os._exit(128 + signum)
        asked.noted = signal.Signals(signum)
        os.write(2, f"{asked.noted.name}: saving, then ending (once more: at once)\n".encode())
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            asked.which = asked.noted

    mine = (signal.SIGINT,) if several else CAUGHT
    if threading.current_thread() is not threading.main_thread():
        mine = ()
    before = {signum: signal.signal(signum, handle) for signum in mine}
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
