"""One watchdog in every process: it ends the process, with a line that says why, once the run
cannot go on.

Every few seconds each process writes a report into the key-value store of jax's coordination
service. Process 0 reads all reports and writes a verdict, for which the others wait. Files in the
run's folder would need a file system that shows every host the same at once; the store needs jax's
port alone. It ends with process 0: when that is killed, jax aborts the others at the same moment as
the watchdog, and either message may come first.
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
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ladder_jax.errors import RunFailed, Stopped, UserError, one_line
from ladder_jax.processes.options import Timeouts

GO_ON = "all processes stop; the same command on each goes on from the last checkpoint"
REPORTS = "ladder_jax/reports"
LEFT = "ladder_jax/left"
VERDICT = "ladder_jax/verdict"
TICK = 0.2  # seconds between two looks at the reports
SETTLE = 1.0  # seconds after a verdict in which a process may still end with an error of its own
# seconds at most in which the others read the verdict, before process 0 and the store end
FAREWELL = 5.0
LONGEST = 1e6  # seconds: Python's waits have a limit


class End(enum.StrEnum):
    """How a process ended, by its own report."""

    FAILED = "failed"  # with a line that says why
    CRASHED = "crashed"  # as those do whose partner in a collective is gone
    DONE = "done"  # finished, or saved after a signal: nothing is wrong


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process writes every few seconds.

    number: of this report; heartbeats: how far it is, `doing` in words; end, how: how it ended, in
    words that go on from its name.
    """

    number: int = 0
    heartbeats: int = 0
    doing: str = "starting"
    end: End | None = None
    how: str = ""


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
    """All processes of a run, as process 0 sees them. Times are of one monotonic clock, in
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
    def all_done(self) -> bool:
        return all(seen.report.end == End.DONE for seen in self._seen)

    def name(self, process: int) -> str:
        return f"process {process} of {len(self._hosts)} (host {self._hosts[process]})"

    def verdict(self, *, now: float) -> Verdict | None:
        """A lost process goes before one that failed, and that before one that crashed: each may
        cause the next.
        """
        live = {}
        for process, seen in enumerate(self._seen):
            if not seen.report.end:
                live[process] = seen
        return self._lost(live, now) or self._ended(live) or self._hanging(live, now)

    def _lost(self, live: Live, now: float) -> Verdict | None:
        lost = self._timeouts.lost
        interval = self._timeouts.interval
        silence = {process: now - seen.heard for process, seen in live.items()}
        if max(silence.values(), default=0.0) <= lost:
            return None
        about = []
        told = []
        for process, seconds in silence.items():
            if seconds > lost - interval:  # hosts behind a switch
                about.append(process)
                told.append(f"{self.name(process)} has not been heard of for {lost:g} s")
        return Verdict("; ".join(told), tuple(about))

    def _ended(self, live: Live) -> Verdict | None:
        """The first failure; else the first crash, once every other process has shown that it was
        alive after it.
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
            alive = all(seen.heard > when for seen in live.values())
            if end is End.FAILED or alive:
                how = self._seen[process].report.how
                return Verdict(f"{self.name(process)} {how}", (process,))
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
        behind = []
        told = []
        for process, report in reports.items():
            if report.heartbeats == least:
                behind.append(process)
                told.append(f"{self.name(process)} hangs at: {report.doing}")
        waited = f"the others have waited for it at: {ahead.doing}, for {hang:g} s (--hang-timeout waits longer)"
        told.append(waited)
        return Verdict("; ".join(told), tuple(behind))


class Watchdog:
    """client: of jax's coordination service; process: the number of this one; hosts: of all, by
    number.

    A call of the store never returns while process 0 stands still. Whichever thread waits in one,
    `_follow` ends the process then.
    """

    def __init__(self, client: Any, *, process: int, hosts: list[str], timeouts: Timeouts):
        self._client = client
        self._process = process
        self._count = len(hosts)
        self._timeouts = timeouts
        self._members = Members(hosts, timeouts=timeouts, now=time.monotonic())
        self._report = Report()
        self._numbers = itertools.count(1)
        self._verdict: Verdict | None = None
        self._judged = threading.Event()
        self._ending = threading.Event()
        self._done = threading.Event()
        self._telling = threading.Lock()
        self._last_words = threading.Lock()  # of the thread that ends the process
        self._answered = time.monotonic()  # when process 0 last took a report
        watch = self._judge if process == 0 else self._follow
        self._threads = []
        for loop in (self._write, watch):
            thread = threading.Thread(target=self._run, args=(loop,), name="watchdog", daemon=True)
            self._threads.append(thread)

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
        for thread in self._threads:
            thread.start()
        try:
            yield
        except Stopped:  # all have stopped after the same step
            self._finish()
            raise
        except (UserError, RunFailed) as error:
            self._fail(End.FAILED, f"ended: {error}")
            status = 2 if isinstance(error, UserError) else error.status
            self._end(str(error), status)
        except KeyboardInterrupt:
            self._fail(End.FAILED, "was interrupted")
            self._end("interrupted", 130)
        except Exception as error:
            told = "".join(traceback.format_exception_only(error))
            last = told.strip().splitlines()[-1][:300]
            self._fail(End.CRASHED, f"crashed: {last}")
            verdict = self._verdict
            if verdict is None or self._process in verdict.about:
                traceback.print_exc()
                text = f"{self._members.name(self._process)} crashed: {last}"
            else:
                text = verdict.text
            self._stop(text)
        self._finish()

    def _fail(self, end: End, how: str) -> None:
        """Report the end. Process 0 then waits for its verdict, as all do after a crash: another
        may have caused it.
        """
        sys.stdout.flush()
        self._ending.set()
        self._tell(end=end, how=how)
        if self._process == 0 or end is End.CRASHED:
            seconds = self._timeouts.lost + 3 * self._timeouts.interval
            self._judged.wait(min(seconds, LONGEST))

    def _finish(self) -> None:
        """Process 0 waits until the others have finished too."""
        sys.stdout.flush()
        self._tell(end=End.DONE)
        self._done.set()
        if self._process == 0:
            self._ending.set()
            self._judged.wait()
            if self._verdict is not None:
                self._stop(self._verdict.text)
        for thread in self._threads:
            thread.join(FAREWELL)

    def _tell(self, **changes: Any) -> None:
        """Write the report. Only the main thread changes it."""
        if changes:
            self._report = dataclasses.replace(self._report, **changes)
        # it is gone: `_follow` hears it too
        with self._telling, contextlib.suppress(jax.errors.JaxRuntimeError):
            report = dataclasses.asdict(self._report)
            report["number"] = next(self._numbers)
            key = f"{REPORTS}/{self._process}"
            self._client.key_value_set(key, json.dumps(report), allow_overwrite=True)
            self._answered = time.monotonic()

    def _stop(self, text: str) -> None:
        self._end(f"{text}: {GO_ON}", 1)

    def _end(self, line: str, status: int) -> None:
        """Say why, and end without jax's farewell. Python's buffers stay: a stuck thread may hold
        their locks.
        """
        self._last_words.acquire()
        os.write(2, f"ladder-jax: {one_line(line)}\n".encode())
        farewell = threading.Thread(target=self._farewell, daemon=True)
        farewell.start()
        farewell.join(SETTLE if self._process else FAREWELL)
        os._exit(status)

    def _farewell(self) -> None:
        """Process 0 waits until the others have left: jax aborts them when the store ends
        before.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if self._process:
                return self._client.key_value_set(f"{LEFT}/{self._process}", "")
            gone = {0}
            if self._verdict is not None:
                gone.update(self._verdict.about)
            while len(gone) < self._count:
                for key, _ in self._client.key_value_dir_get(f"{LEFT}/"):
                    gone.add(_process_of(key))
                time.sleep(TICK)
            time.sleep(SETTLE)  # those that have left are about to end

    def _run(self, loop: Callable[[], None]) -> None:
        """A run that nobody watches over would hang where it should end."""
        try:
            loop()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _write(self) -> None:
        while not self._done.is_set():
            self._tell()
            self._done.wait(self._timeouts.interval)

    def _judge(self) -> None:
        """In process 0: read the reports until all are done, or one verdict is given."""
        members = self._members
        before = time.monotonic()
        while not members.all_done:
            time.sleep(TICK)
            now = time.monotonic()
            for key, value in self._client.key_value_dir_get(f"{REPORTS}/"):
                report = Report(**json.loads(value))
                members.update(_process_of(key), report, now=now)
            stood = now - before
            before = now
            if stood > self._timeouts.lost:  # the others have ended meanwhile
                verdict = Verdict(f"{members.name(0)} stood still for {stood:.0f} s", (0,))
            else:
                verdict = members.verdict(now=now)
            if verdict is not None:
                value = json.dumps(dataclasses.asdict(verdict))
                self._client.key_value_set(VERDICT, value)
                return self._over(verdict)
        self._judged.set()

    def _follow(self) -> None:
        """In every other process: wait for the verdict, or for the loss of process 0."""
        leader = self._members.name(0)
        lost = self._timeouts.lost
        milliseconds = max(1, int(1000 * min(1.0, self._timeouts.interval)))
        while not self._done.is_set():
            try:
                value = self._client.blocking_key_value_get(VERDICT, milliseconds)
                verdict = Verdict(**json.loads(value))
            except jax.errors.JaxRuntimeError as error:
                gone = "DEADLINE_EXCEEDED" not in str(error)
                if gone and self._report.end != End.DONE:  # jax aborts on this at the same moment
                    self._stop(f"{leader} is gone")
                if gone or time.monotonic() - self._answered <= lost:
                    continue
                verdict = Verdict(f"{leader} has not been heard of for {lost:g} s", (0,))
            if not self._done.is_set():
                self._over(verdict)
            return

    def _over(self, verdict: Verdict) -> None:
        """End this process, unless its main thread is about to, with an error of its own."""
        self._verdict = verdict
        self._judged.set()
        if self._ending.wait(SETTLE):
            time.sleep(FAREWELL)
        self._stop(verdict.text)


def _process_of(key: str) -> int:
    return int(key.rpartition("/")[2])
