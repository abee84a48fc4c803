"""The worker's side: it joins the others through jax, and tells its parent how far it is and how it ends."""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, MutableMapping

from ladder_jax.errors import RunFailed, Stopped, UserError
from ladder_jax.processes.child import VARIABLE
from ladder_jax.processes.link import Gone, Link
from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Worker:
    """One process of several."""

    def __init__(self, place: Place, *, link: Link, patience: Patience):
        self.place, self._link, self.patience = place, link, patience
        self._beats = 0

    def beat(self, doing: str) -> None:
        """Say how far this process is: all processes say the same in the same order, so the one who is behind shows."""
        self._beats += 1
        with contextlib.suppress(Gone):  # then its parent is gone, and `_live_with` ends it
            self._link.send(beats=self._beats, doing=doing)

    def initialize(self) -> None:
        """Connect jax with the other processes; before the first use of a device."""
        import jax

        if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in os.environ:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        place, patience = self.place, self.patience
        # jax's own waits end in an abort, so they are the longer ones.
        whole = lambda seconds: int(min(seconds, 1e6))
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=whole(patience.start),
            heartbeat_timeout_seconds=whole(2 * patience.lost + 60),
            shutdown_timeout_seconds=whole(patience.lost + 60),
        )
        self.beat("connected")

    def last_words(self, **words: str) -> None:
        with contextlib.suppress(Gone):
            self._link.send(**words)


@contextlib.contextmanager
def attached(environ: MutableMapping[str, str] = os.environ) -> Iterator[Worker | None]:
    """The worker that this process is, if its parent is `supervise`; its errors are then the parent's to print."""
    if VARIABLE not in environ:
        yield None
        return
    told = json.loads(environ.pop(VARIABLE))
    link = Link(socket.socket(fileno=told["link"]))
    place = {**told["place"], "local_devices": _tuple(told["place"]["local_devices"])}
    worker = Worker(Place(**place), link=link, patience=Patience(**told["patience"]))
    _live_with(told["link"])
    sys.stdout = os.fdopen(told["stdout"], "w", buffering=1, encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(told["stderr"], "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    try:
        yield worker
    except Stopped as stopped:  # all have stopped at the same step, and part in order
        worker.last_words(line=str(stopped))
        raise SystemExit(stopped.status) from None
    except (UserError, RunFailed) as error:
        worker.last_words(line=str(error))
        _leave(2 if isinstance(error, UserError) else error.status)
    except Exception:
        worker.last_words(trace=traceback.format_exc())
        _leave(1)


def _leave(status: int) -> None:
    """Without jax's farewell, which waits for processes that may never come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _live_with(parent: int) -> None:
    """End with the parent, however that ends. `parent`: the file descriptor of the link to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        gone = select.poll()
        gone.register(parent, 0)  # hanging up is always reported
        gone.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)
