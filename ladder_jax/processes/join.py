"""How a process joins the others of its run: connected by jax, with the same settings, under a
watchdog.

jax finds SLURM, Open MPI, Cloud TPU and Kubernetes by itself. Its own failures are aborts with a
stack trace: here they are one line.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ladder_jax.errors import UserError, end_process, error_text
from ladder_jax.processes.options import CHIPS, ProcessSpec, Timeouts, incomplete
from ladder_jax.terminal import Say

ANNOUNCE_AFTER = 10.0  # seconds until a process prints that it waits for others
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# jax's settings that change numbers, by their names in the environment, too
NUMERIC = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_RANDOM_SEED_OFFSET",
    "JAX_THREEFRY_PARTITIONABLE",
)


@contextlib.contextmanager
def joined(
    spec: ProcessSpec, *, settings: dict[str, Any], timeouts: Timeouts, say: Say
) -> Iterator[Callable[[str], None]]:
    """Connect jax with the run's other processes, before the first use of a device, and watch over
    all while open. Yields a function that notes progress, in the same words and order on all
    processes.

    settings: JSON values that must be equal on all processes. Raises UserError where they are not,
    before any collective. Ends the process with status 1 and one line when others are missing, lost
    or stuck.
    """
    if not connect(spec, timeouts=timeouts, say=say):
        yield lambda doing: None
        return
    import jax
    from flax import traverse_util
    from jax._src import distributed

    from ladder_jax.processes.agreement import Agreement
    from ladder_jax.processes.watchdog import Watchdog

    state = distributed.global_state
    process = state.process_id
    processes = state.num_processes
    given = traverse_util.flatten_dict(settings, sep=".") | {"--processes": processes}
    given |= {name: getattr(jax.config, name.lower()) for name in NUMERIC}
    mine = {"host": socket.gethostname(), "settings": given}
    agreement = Agreement("settings", timeout=timeouts.start, place=(process, processes))
    hosts = _hosts(agreement.gather("its settings", mine))
    watchdog = Watchdog(state.client, process=process, hosts=hosts, timeouts=timeouts)
    with watchdog.watching():
        watchdog.heartbeat("connected")
        yield watchdog.heartbeat


def _hosts(reports: list[dict[str, Any]]) -> list[str]:
    """The hosts of all processes. Raises UserError for the first whose settings are not process
    0's.
    """
    hosts = [report["host"] for report in reports]
    first = reports[0]["settings"]
    for process, report in enumerate(reports):
        other = report["settings"]
        names = [name for name in other | first if other.get(name) != first.get(name)]
        if names:
            differ = [f"{name} is {other.get(name)!r}, not {first.get(name)!r}" for name in names]
            raise UserError(
                f"process {process} of {len(hosts)} (host {hosts[process]}) differs from process 0 (host {hosts[0]}):"
                f" {'; '.join(differ)}"
            )
    return hosts


def connect(spec: ProcessSpec, *, timeouts: Timeouts, say: Say) -> bool:
    """Connect jax; False for a process that trains alone, also one on a machine that only looks like
    one of a TPU slice.

    Raises UserError where jax cannot find out what `spec` leaves open, or where the coordinator's
    port is in use. Ends the process with status 1 and one line when the others have not joined in
    time.
    """
    import jax
    from jax._src import distributed  # which has no public name for what `initialize` has made

    if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    bind = None
    if spec.process == 0 and spec.coordinator and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        bind = _bind_address(spec.coordinator)
    try:
        with _in_time(spec, timeouts=timeouts, say=say), _interruptible():
            # jax's own time-outs end in an abort with a stack trace, so they are the longer ones.
            jax.distributed.initialize(
                spec.coordinator,
                spec.processes,
                spec.process,
                cluster_detection_method=None if spec.cluster else "deactivate",
                coordinator_bind_address=bind,
                initialization_timeout=int(timeouts.start + 60),
                heartbeat_timeout_seconds=int(2 * timeouts.lost + 60),
                shutdown_timeout_seconds=int(timeouts.lost + 60),
            )
    except Exception as error:  # of whatever the cluster's own service raises
        if spec == ProcessSpec(None, None, None, CHIPS) and isinstance(error, ValueError):
            return False
        why = error_text(error)
        if spec.cluster is None:
            raise UserError(f"jax cannot join the other processes: {why}") from None
        raise incomplete(f"{spec.cluster} was recognised, but {why}", spec) from None
    return distributed.global_state.num_processes > 1


def _bind_address(coordinator: str) -> str | None:
    """Where jax listens: on the loopback interface if that is HOST, else on all (None).

    Raises UserError where another program does: some versions of jax crash on it.
    """
    host, _, port = coordinator.rpartition(":")
    alone = host in LOOPBACK
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    try:
        bound = (host.strip("[]") if alone else "", int(port))
        socket.create_server(bound, family=family).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(
            f"process 0 cannot listen on port {port}: {why}; choose another in --coordinator"
        ) from None
    return coordinator if alone else None


@contextlib.contextmanager
def _in_time(spec: ProcessSpec, *, timeouts: Timeouts, say: Say) -> Iterator[None]:
    """While jax waits for all processes: print that it does, and end this process with one line
    after `start`.
    """
    me = f"this process (host {socket.gethostname()})"
    if spec.process is not None:
        me = f"process {spec.process} of {spec.processes} (host {socket.gethostname()})"
    where = f" at {spec.coordinator}" if spec.coordinator else ""

    def give_up() -> None:
        why = f"has waited{where} for {timeouts.start:g} s, and not all processes have joined"
        end_process(
            f"{me} {why}: start all with the same --coordinator and --processes, or wait longer with --start-timeout"
        )

    waits = f"{me} waits for the others; a process that prints no such line has not started"
    timers = (
        threading.Timer(ANNOUNCE_AFTER, say, [waits]),
        threading.Timer(timeouts.start, give_up),
    )
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process by the system's own action: Python's handler waits until native code
    returns.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
