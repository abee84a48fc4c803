"""SIGTERM (preemption) and SIGINT: the first asks for an orderly end, the second ends at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """The signal that asks this run to stop, if one came.

    signum: the one that the run acts on; received: the one that this process received, of which the others of several
    processes may not know yet.
    """

    signum: signal.Signals | None = None
    received: signal.Signals | None = None

    @property
    def interrupts(self) -> bool:
        """Whether to break off work between two steps. With several processes never: all must stop at one step."""
        return jax.process_count() == 1 and self.signum is not None

    def after(self, step: int) -> bool:
        """Whether to stop after `step`: the same answer on all processes."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.signum = self.received or signal.SIGTERM
        return self.signum is not None


@contextlib.contextmanager
def caught() -> Iterator[StopRequest]:
    """While it is open, the first signal only sets the request; outside of the main thread none is caught.

    With several processes SIGTERM belongs to jax's own notifier, which informs all of them (see `StopRequest.after`),
    and SIGINT is sent on as SIGTERM.
    """
    request, several = StopRequest(), jax.process_count() > 1

    def handle(signum: int, _) -> None:
        if request.received is not None:
            os.write(2, f"ladder-jax: {signal.Signals(signum).name} again: ending at once\n".encode())
            os._exit(128 + signum)
        request.received = signal.Signals(signum)
        os.write(2, f"{request.received.name}: saving, then ending (once more: at once)\n".encode())
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            request.signum = request.received

    mine = (signal.SIGINT,) if several else CAUGHT
    if threading.current_thread() is not threading.main_thread():
        mine = ()
    before = {signum: signal.signal(signum, handle) for signum in mine}
    try:
        yield request
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
