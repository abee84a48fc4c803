"""`jax.distributed.initialize`, whose own failures are aborts with a stack trace: here they are one line.

jax finds SLURM, Open MPI, Cloud TPU and Kubernetes by itself.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from ladder_jax.errors import UserError
from ladder_jax.processes.options import CHIPS, Patience, ProcessSpec, incomplete

ANNOUNCE_AFTER = 10.0  # seconds until a process prints that it waits for others
LONGEST = 1e6  # seconds: jax's time-outs are integers
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def connect(spec: ProcessSpec, *, patience: Patience, say: Callable[[str], None]) -> bool:
    """Connect jax; False on a machine that only looks like one of a TPU slice: it trains alone.

    Raises UserError where jax cannot find out what `spec` leaves open, or where the coordinator's port is in use. Ends
    the process with status 1 and one line when the others have not joined in time.
    """
    import jax

    if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    bind = None
    if spec.process == 0 and spec.coordinator and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        bind = _bind_address(spec.coordinator)
    whole = lambda seconds: int(min(seconds, LONGEST))
    nothing = (spec.coordinator, spec.processes, spec.process) == (None, None, None)
    try:
        with _in_time(spec, patience=patience, say=say):
            # jax's own time-outs end in an abort with a stack trace, so they are the longer ones.
            jax.distributed.initialize(
                spec.coordinator,
                spec.processes,
                spec.process,
                cluster_detection_method=None if spec.cluster else "deactivate",
                coordinator_bind_address=bind,
                initialization_timeout=whole(patience.start + 60),
                heartbeat_timeout_seconds=whole(2 * patience.lost + 60),
                shutdown_timeout_seconds=whole(patience.lost + 60),
            )
    except Exception as error:  # of whatever the cluster's own service raises
        if spec.cluster == CHIPS and nothing and isinstance(error, ValueError):
            return False
        why = " ".join(str(error).split()) or type(error).__name__
        if spec.cluster is None:
            raise UserError(f"jax cannot join the other processes: {why}") from None
        raise incomplete(f"{spec.cluster} was recognised, but {why}", spec) from None
    return True


def _bind_address(coordinator: str) -> str | None:
    """Where jax listens: on the loopback interface if that is HOST, else on all (None).

    Raises UserError where another program does: some versions of jax crash on it.
    """
    host, _, port = coordinator.rpartition(":")
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    alone = host in LOOPBACK
    try:
        socket.create_server((host.strip("[]") if alone else "", int(port)), family=family).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"process 0 cannot listen on port {port}: {why}; choose another in --coordinator") from None
    return coordinator if alone else None


@contextlib.contextmanager
def _in_time(spec: ProcessSpec, *, patience: Patience, say: Callable[[str], None]) -> Iterator[None]:
    """While jax waits for all processes: print that it does, and end this process with one line after `start`."""
    joined = threading.Event()
    number = "this process" if spec.process is None else f"process {spec.process} of {spec.processes}"
    me = f"{number} (host {socket.gethostname()})"

    def watch() -> None:
        began, announced = time.monotonic(), False
        unreachable = "not tried" if spec.coordinator and spec.process else ""
        while (waited := time.monotonic() - began) < patience.start:
            if joined.wait(min(1.0, patience.start - waited)):
                return
            if unreachable:
                unreachable = _unreachable(spec.coordinator)
            if waited > ANNOUNCE_AFTER and not announced:
                say(f"{me} waits for the others; a process that prints no such line has not started")
                announced = True
        where = f" at {spec.coordinator}" if spec.coordinator else ""
        if unreachable:
            why = f"has not reached process 0{where} within {patience.start:g} s ({unreachable})"
        else:
            why = f"has waited{where} for {patience.start:g} s, and not all processes have joined"
        line = f"{me} {why}: start all with the same --coordinator and --processes, or wait longer with --start-timeout"
        os.write(2, f"ladder-jax: {line}\n".encode())
        os._exit(1)

    thread = threading.Thread(target=watch, name="start time-out", daemon=True)
    thread.start()
    try:
        with _interruptible():
            yield
    finally:
        joined.set()
        thread.join()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process by the system's own action: Python's handler waits until native code returns."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _unreachable(coordinator: str) -> str:
    """Why nothing answers at HOST:PORT; nothing where something does."""
    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
