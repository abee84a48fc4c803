"""How a process joins the others of its run: through jax, and only with the same settings."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.processes.options import CHIPS, Patience, ProcessSpec, incomplete

KEY = "ladder_jax/settings"
SAID_AFTER = 10.0  # seconds until a process says that it waits for others
LONGEST = 1e6  # seconds: jax's time-outs are integers
SHOWN = 3  # differing settings in a message
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True)
class Member:
    """This process of a run. beat: notes progress, in the same words and order on all processes."""

    process: int = 0
    processes: int = 1
    beat: Callable[[str], None] = lambda doing: None


@contextlib.contextmanager
def joined(
    spec: ProcessSpec | None, *, settings: Mapping[str, Any], patience: Patience, say: Callable[[str], None]
) -> Iterator[Member]:
    """Connect jax with the run's other processes, before the first use of a device, and watch over all while open.

    spec: None trains alone; settings: JSON values that must be equal on all processes. Raises UserError where they are
    not, before any collective. Ends the process with status 1 and one line when others are missing, lost or stuck.
    """
    if spec is None or not _initialize(spec, patience=patience, say=say):
        yield Member()
        return
    from jax._src import distributed  # which has no public name for what `initialize` has made

    from ladder_jax.processes.watchdog import Watchdog

    state = distributed.global_state
    process, processes = state.process_id, state.num_processes
    if processes == 1:
        yield Member()
        return
    hosts = _compare(state.client, settings, process=process, processes=processes, patience=patience)
    watchdog = Watchdog(state.client, process=process, hosts=hosts, patience=patience)
    with watchdog.watching(), _second_interrupt():
        watchdog.beat("connected")
        yield Member(process, processes, beat=watchdog.beat)


def _initialize(spec: ProcessSpec, *, patience: Patience, say: Callable[[str], None]) -> bool:
    """Whether there are processes to join: a machine that only looks like one of a TPU slice trains alone."""
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
    """While jax waits for all processes: say so after a while, and end this process with one line after `start`."""
    came = threading.Event()
    number = "this process" if spec.process is None else f"process {spec.process} of {spec.processes}"
    me = f"{number} (host {socket.gethostname()})"

    def watch() -> None:
        began, said = time.monotonic(), False
        unreachable = "not tried" if spec.coordinator and spec.process else ""
        while (waited := time.monotonic() - began) < patience.start:
            if came.wait(min(1.0, patience.start - waited)):
                return
            if unreachable:
                unreachable = _unreachable(spec.coordinator)
            if waited > SAID_AFTER and not said:
                say(f"{me} waits for the others; one that does not say so has not come")
                said = True
        where = f" at {spec.coordinator}" if spec.coordinator else ""
        if unreachable:
            why = f"has not reached process 0{where} within {patience.start:g} s ({unreachable})"
        else:
            why = f"has waited{where} for {patience.start:g} s, and not all processes have come"
        line = f"{me} {why}: start all with the same --coordinator and --processes, or wait longer with --start-timeout"
        os.write(2, f"ladder-jax: {line}\n".encode())
        os._exit(1)

    thread = threading.Thread(target=watch, name="start time-out", daemon=True)
    thread.start()
    try:
        yield
    finally:
        came.set()
        thread.join()


def _unreachable(coordinator: str) -> str:
    """Why nothing answers at HOST:PORT; nothing where something does."""
    host, _, port = coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _compare(
    client: Any, settings: Mapping[str, Any], *, process: int, processes: int, patience: Patience
) -> list[str]:
    """The hosts of all processes. Raises UserError, in all of them, where their settings differ.

    Through jax's key-value store, as a collective hangs between programs that differ.
    """
    import jax

    def get(key: str, of: int) -> Any:
        milliseconds = int(1000 * min(patience.start, LONGEST)) or 1
        try:
            return json.loads(client.blocking_key_value_get(f"{KEY}/{key}", milliseconds))
        except jax.errors.JaxRuntimeError:
            raise RunFailed(f"process {of} of {processes} has joined, but sent no settings") from None

    mine = {"host": socket.gethostname(), "--processes": processes, "settings": _flat(settings)}
    client.key_value_set(f"{KEY}/{process}", json.dumps(mine))
    if process == 0:
        theirs = [get(str(of), of) for of in range(processes)]
        answer = {"refused": _difference(theirs), "hosts": [one["host"] for one in theirs]}
        client.key_value_set(f"{KEY}/answer", json.dumps(answer))
    else:
        answer = get("answer", 0)
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["hosts"]


def _difference(theirs: list[dict[str, Any]]) -> str | None:
    """Between process 0 and the first that was given anything else, in one line."""
    flat = [one["settings"] | {"--processes": one["--processes"]} for one in theirs]
    absent = object()
    for process, settings in enumerate(flat):
        names = [name for name in settings | flat[0] if settings.get(name, absent) != flat[0].get(name, absent)]
        if names:
            shown = [f"{name} is {settings.get(name)!r}, not {flat[0].get(name)!r}" for name in names[:SHOWN]]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            return (
                f"process {process} of {theirs[0]['--processes']} (host {theirs[process]['host']}) differs from process"
                f" 0 (host {theirs[0]['host']}): {'; '.join(shown)}{more}"
            )
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


@contextlib.contextmanager
def _second_interrupt() -> Iterator[None]:
    """A second Ctrl-C ends at once, also while the main thread waits in a collective and runs no handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def count() -> None:
        interrupts = 0
        while signals := os.read(reader, 1):
            interrupts += signals[0] == signal.SIGINT
            if interrupts == 2:
                os.write(2, b"ladder-jax: SIGINT again: ending at once\n")
                os._exit(128 + signal.SIGINT)
        os.close(reader)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=count, name="second interrupt", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
