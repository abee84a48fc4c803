"""The parent of a worker: meets the other parents, and ends its worker with one clear line when one of them is lost."""

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

from ladder_jax.errors import RunFailed, Stopped, UserError
from ladder_jax.processes import rendezvous
from ladder_jax.processes.child import Child
from ladder_jax.processes.members import SETTLE, Cause, End, Verdict
from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place
from ladder_jax.processes.team import Hub, Spoke, Team

TICK = 0.1  # seconds
GO_ON = "all processes stop; the same command on each goes on from the last checkpoint"


def supervise(place: Place, *, command: list[str], job: str, patience: Patience, say: Callable[[str], None]) -> None:
    """Run `command`, a worker (see `attached`), as one of several processes, to its end.

    job: what must be the same on all processes. Raises the worker's own UserError, RunFailed or Stopped, and RunFailed
    that names the processes which did not come, are lost, have failed, or hang.
    """
    with contextlib.closing(_meet(place, job=job, patience=patience, say=say)) as team, _signals() as asked:
        child = Child(place, command=command, patience=patience)
        try:
            _watch(child, team, place=place, asked=asked)
        finally:
            child.kill()


class _Signals:
    """The signals that came, oldest first."""

    def __init__(self):
        self.came: list[int] = []


def _meet(place: Place, *, job: str, patience: Patience, say: Callable[[str], None]) -> Team:
    host = socket.gethostname()
    if place.process == 0:
        came = rendezvous.gather(place, job=job, patience=patience, host=host, say=say)
        return Hub(came, host=host, place=place, patience=patience)
    link, hosts = rendezvous.join(place, job=job, patience=patience, host=host)
    return Spoke(link, hosts=hosts, place=place, patience=patience)


def _watch(child: Child, team: Team, *, place: Place, asked: _Signals) -> None:
    passed_on = 0
    while True:
        if len(asked.came) > passed_on:
            passed_on += 1
            child.signal(signal.SIGTERM if passed_on == 1 else signal.SIGKILL)
        end = child.poll()
        if end is not None:
            return _ended(end, child, team, place=place, asked=asked)
        if verdict := team.tick(beats=child.beats, doing=child.doing):
            return _judged(verdict, child, place=place)
        _wait(child, team)


def _judged(verdict: Verdict, child: Child, *, place: Place) -> None:
    """Others, or this one's hanging, end the run. A worker that ends by itself just now has its own word."""
    until = time.monotonic() + SETTLE
    while (end := child.poll()) is None and time.monotonic() < until:
        time.sleep(TICK)
    child.kill()
    if end is not None and end.cause is Cause.FAILED:
        _raise(end, child)
    raise RunFailed(f"{verdict.text}: {GO_ON}")


def _ended(end: End, child: Child, team: Team, *, place: Place, asked: _Signals) -> None:
    if asked.came and end.cause is not Cause.FAILED:
        first = signal.Signals(asked.came[0])
        orderly = bool(child.line) or end.status == 0
        how = end.how if orderly else f"was ended by {first.name}"
        end = End(Cause.DONE if orderly else Cause.LOST, how, 128 + first if end.status else 0)
    team.ended(end)
    verdict = _last_ticks(team, child, crashed=end.cause is Cause.CRASHED)
    if asked.came and end.status:
        name = signal.Signals(asked.came[0])
        raise Stopped(child.line or f"{name.name}: ended, with nothing saved since the last checkpoint", signum=name)
    if end.cause is Cause.DONE or child.line:
        return _raise(end, child)
    if verdict is not None and place.process not in verdict.about:
        raise RunFailed(f"{verdict.text}: {GO_ON}")
    sys.stderr.write(child.confess())
    raise RunFailed(f"process {place.process} of {place.processes} {end.how}: {GO_ON}")


def _last_ticks(team: Team, child: Child, *, crashed: bool) -> Verdict | None:
    """Process 0 stays until all have ended, or know why; one that crashed waits to hear of another cause."""
    until = time.monotonic() + 5 * SETTLE
    verdict = None
    while verdict is None and (not team.over or (crashed and time.monotonic() < until)):
        verdict = team.tick(beats=child.beats, doing=child.doing)
        time.sleep(TICK)
    return verdict


def _raise(end: End, child: Child) -> None:
    """The worker's own line, with its status."""
    if end.status == 2:
        raise UserError(child.line)
    if end.status > 128:
        raise Stopped(child.line, signum=end.status - 128)
    if end.status:
        raise RunFailed(child.line or end.how)


def _wait(child: Child, team: Team) -> None:
    with selectors.DefaultSelector() as ready:
        for source in (*child.sources, *team.links):
            ready.register(source, selectors.EVENT_READ)
        ready.select(TICK)


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """While it is open, SIGTERM and Ctrl-C are noted, for `_watch`."""
    signals = _Signals()

    def handle(signum: int, _) -> None:
        signals.came.append(signum)
        name = signal.Signals(signum).name
        if len(signals.came) == 1:
            os.write(2, f"{name}: saving, then ending (once more: at once)\n".encode())

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
