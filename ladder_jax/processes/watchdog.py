"""One watchdog in every process: it ends the process, with a line that says why, once the run
cannot go on.

Every few seconds each process writes a report into the key-value store of jax's coordination
service, reads all reports, and judges them by the same rules as the others. Files in the run's
folder would need a file system that shows every host the same at once; the store needs jax's port
alone. It ends with process 0: when that is killed, jax aborts the others at the same moment as the
watchdog, and either message may come first.
"""

import contextlib
import dataclasses
import enum
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from ladder_jax.errors import RunFailed, Stopped, UserError, one_line
from ladder_jax.processes.options import Timeouts

GO_ON = "all processes stop; the same command on each goes on from the last checkpoint"
REPORTS = "ladder_jax/reports"
TICK = 0.2  # seconds
SETTLE = 1.0  # seconds after a verdict in which a process may still end with an error of its own


class End(enum.StrEnum):
    """How a process ended, by its own report."""

    FAILED = "failed"  # with a line that says why
    CRASHED = "crashed"  # as those do whose partner in a collective is gone
    DONE = "done"  # finished, or saved after a signal: nothing is wrong


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process writes every few seconds.

    number: of this report; heartbeats: how far it is, `doing` in words; end, how: how it ended, in
    words that go on from its name. judged: it has found the run over, and reports no more.
    """

    number: int = 0
    heartbeats: int = 0
    doing: str = "starting"
    end: End | None = None
    how: str = ""
    judged: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The run is over, because of these processes."""

    text: str
    about: tuple[int, ...]


@dataclasses.dataclass
class _Seen:
    """The newest report of a process; when it came, when its `heartbeats` last grew, and when its
    `end` came.
    """

    report: Report
    heard: float
    moved: float
    ended: float = 0.0


type Live = dict[int, _Seen]  # the processes that have not ended


class Members:
    """All processes of a run, as one of them sees them. Times are of its monotonic clock, in
    seconds.
    """

    def __init__(self, hosts: list[str], *, timeouts: Timeouts, now: float):
        self._hosts = hosts
        self._timeouts = timeouts
        self._seen = [_Seen(Report(), heard=now, moved=now) for _ in hosts]

    def update(self, process: int, report: Report, *, now: float) -> None:
        seen = self._seen[process]
        before = seen.report
        seen.report = report
        if report.number != before.number:
            seen.heard = now
        if report.heartbeats != before.heartbeats:
            seen.moved = now
        if report.end != before.end:
            seen.ended = now

    @property
    def count(self) -> int:
        return len(self._hosts)

    @property
    def all_done(self) -> bool:
        return all(seen.report.end == End.DONE for seen in self._seen)

    def name(self, process: int) -> str:
        return f"process {process} of {len(self._hosts)} (host {self._hosts[process]})"

    def verdict(self, *, now: float) -> Verdict | None:
        """A lost process goes before one that failed, and that before one that crashed: each may
        cause the next.
        """
        live = {n: seen for n, seen in enumerate(self._seen) if not seen.report.end}
        return self._lost(live, now) or self._ended(live) or self._hanging(live, now)

    def _lost(self, live: Live, now: float) -> Verdict | None:
        lost = self._timeouts.lost
        interval = self._timeouts.interval
        silence = {process: now - seen.heard for process, seen in live.items()}
        if max(silence.values(), default=0.0) <= lost:
            return None
        # all that fell silent at about that time, as hosts behind a switch do
        silent = [process for process, seconds in silence.items() if seconds > lost - interval]
        return self._blamed(silent, f"has not been heard of for {lost:g} s")

    def _ended(self, live: Live) -> Verdict | None:
        """The first failure; else the first crash, once every other process has shown that it was
        alive after it, or has judged.
        """
        for end in (End.FAILED, End.CRASHED):
            ended = [
                (seen.ended, process)
                for process, seen in enumerate(self._seen)
                if seen.report.end == end
            ]
            if not ended:
                continue
            when, process = min(ended)
            alive = all(seen.heard > when or seen.report.judged for seen in live.values())
            if end is End.FAILED or alive:
                return self._blamed([process], self._seen[process].report.how)
        return None

    def _hanging(self, live: Live, now: float) -> Verdict | None:
        hang = self._timeouts.hang
        moved = max((seen.moved for seen in live.values()), default=now)
        if now - moved <= hang:
            return None
        reports = {process: seen.report for process, seen in live.items()}
        ahead = max(reports.values(), key=lambda report: report.heartbeats)
        least = min(report.heartbeats for report in reports.values())
        if ahead.heartbeats == least:
            text = f"no process got on for {hang:g} s (all are at: {ahead.doing}); a longer wait is --hang-timeout"
            return Verdict(text, ())
        behind = [process for process, report in reports.items() if report.heartbeats == least]
        blamed = self._blamed(behind, f"hangs at: {reports[behind[0]].doing}")
        waited = f"the others have waited for it at: {ahead.doing}, for {hang:g} s (--hang-timeout waits longer)"
        return Verdict(f"{blamed.text}; {waited}", blamed.about)

    def _blamed(self, processes: list[int], how: str) -> Verdict:
        told = [f"{self.name(process)} {how}" for process in processes]
        return Verdict("; ".join(told), tuple(processes))


class Watchdog:
    """client: of jax's coordination service; process: the number of this one; hosts: of all, by
    number.

    A call of the store never returns while process 0 stands still: `_guard` ends the process then.
    """

    def __init__(self, client: Any, *, process: int, hosts: list[str], timeouts: Timeouts):
        self._client = client
        self._process = process
        self._timeouts = timeouts
        self._members = Members(hosts, timeouts=timeouts, now=time.monotonic())
        self._report = Report()
        self._numbers = itertools.count(1)
        self._verdict: Verdict | None = None
        self._judged = threading.Event()  # there is a verdict, or all are done
        self._ending = threading.Event()  # the main thread ends the process
        self._done = threading.Event()
        self._writing = threading.Lock()
        self._last_words = threading.Lock()  # of the thread that ends the process
        self._answered = time.monotonic()  # when the store last did

    def heartbeat(self, doing: str) -> None:
        """Note progress: all processes note the same in the same order, so that one that is behind
        shows.
        """
        heartbeats = self._report.heartbeats + 1
        self._report = dataclasses.replace(self._report, heartbeats=heartbeats, doing=doing)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs. An error in it ends this process: jax's own end would wait
        for the others.
        """
        for loop in (self._watch, self._guard):
            threading.Thread(target=loop, name="watchdog", daemon=True).start()
        try:
            yield
        except Stopped:  # all have stopped after the same step
            self._finish()
            raise
        except (UserError, RunFailed) as error:
            self._tell_end(End.FAILED, f"ended: {error}")
            status = 2 if isinstance(error, UserError) else error.status
            self._end(str(error), status)
        except KeyboardInterrupt:
            self._tell_end(End.FAILED, "was interrupted")
            self._end("interrupted", 130)
        except Exception as error:
            told = "".join(traceback.format_exception_only(error))
            last = told.strip().splitlines()[-1][:300]
            self._tell_end(End.CRASHED, f"crashed: {last}")
            # another may have caused it
            self._judged.wait(self._timeouts.lost + 3 * self._timeouts.interval)
            verdict = self._verdict
            if verdict is None or self._process in verdict.about:
                traceback.print_exc()
                self._stop(f"{self._members.name(self._process)} crashed: {last}")
            self._stop(verdict.text)
        self._finish()

    def _finish(self) -> None:
        """Process 0 waits until the others have finished too."""
        self._tell_end(End.DONE)
        if self._process == 0:
            self._judged.wait()
            if self._verdict is not None:
                self._stop(self._verdict.text)
        self._done.set()

    def _tell_end(self, end: End, how: str = "") -> None:
        sys.stdout.flush()
        self._ending.set()
        self._report = dataclasses.replace(self._report, end=end, how=how)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is gone: `_watch` hears it too
            self._tell()

    def _tell(self, *, judged: bool = False) -> None:
        """Write the report, which the main thread alone changes."""
        with self._writing:
            number = next(self._numbers)
            report = dataclasses.replace(self._report, number=number, judged=judged)
            value = json.dumps(dataclasses.asdict(report))
            key = f"{REPORTS}/{self._process}"
            self._client.key_value_set(key, value, allow_overwrite=True)

    def _reports(self) -> dict[int, Report]:
        found = self._client.key_value_dir_get(f"{REPORTS}/")
        return {int(key.rpartition("/")[2]): Report(**json.loads(value)) for key, value in found}

    def _watch(self) -> None:
        """Report, read the reports and judge them, until all are done or there is a verdict."""
        members = self._members
        while not members.all_done:
            verdict = None
            try:
                self._tell()
                reports = self._reports()
            except jax.errors.JaxRuntimeError:  # jax aborts on this at the same moment
                verdict = Verdict(f"{members.name(0)} is gone", (0,))
            else:
                self._answered = time.monotonic()
                for process, report in reports.items():
                    members.update(process, report, now=self._answered)
                verdict = members.verdict(now=self._answered)
            if self._done.is_set():
                return
            if verdict is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store may be gone
                    self._tell(judged=True)
                return self._over(verdict)
            interval = self._timeouts.interval
            if self._ending.wait(interval):  # process 0 waits for the others
                self._done.wait(TICK if self._process == 0 else interval)
        self._judged.set()

    def _guard(self) -> None:
        """End this process where the store, which is process 0's, does not answer."""
        lost = self._timeouts.lost
        while not self._done.wait(TICK):
            if time.monotonic() - self._answered > lost:
                silent = f"{self._members.name(0)} has not been heard of for {lost:g} s"
                return self._over(Verdict(silent, (0,)))

    def _over(self, verdict: Verdict) -> None:
        """End this process, unless its main thread is about to, with an error of its own."""
        self._verdict = verdict
        self._judged.set()
        if not self._ending.wait(SETTLE):
            self._stop(verdict.text)

    def _stop(self, text: str) -> None:
        self._end(f"{text}: {GO_ON}", 1)

    def _end(self, line: str, status: int) -> None:
        """Say why, and end without jax's farewell. Python's buffers stay: a stuck thread may hold
        their locks.
        """
        self._last_words.acquire()
        os.write(2, f"ladder-jax: {one_line(line)}\n".encode())
        if self._process == 0:
            self._let_others_end()
        os._exit(status)

    def _let_others_end(self) -> None:
        """jax aborts them when process 0's store ends. Wait until each has failed or judged, for two
        reports' time at most; then until they have ended.
        """
        until = time.monotonic() + 2 * (self._timeouts.interval - SETTLE)
        with contextlib.suppress(Exception):  # this process ends, whatever the store does
            while time.monotonic() < until and not self._all_end():
                time.sleep(TICK)
        time.sleep(3 * SETTLE)

    def _all_end(self) -> bool:
        ending = [one for one in self._reports().values() if one.judged or one.end == End.FAILED]
        return len(ending) == self._members.count
