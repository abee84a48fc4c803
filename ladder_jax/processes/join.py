"""How a process joins the others of its run: connected by jax, with the same settings, under a watchdog."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ladder_jax.errors import RunFailed, UserError
from ladder_jax.processes.connect import connect
from ladder_jax.processes.options import Patience, ProcessSpec

KEY = "ladder_jax/settings"
LONGEST = 1e6  # seconds: jax's time-outs are integers of milliseconds
SHOWN = 3  # differing settings in a message


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
    if spec is None or not connect(spec, patience=patience, say=say):
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
