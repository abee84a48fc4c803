"""One watchdog in every process: it ends the process, with a line that says why, once the run cannot go on.

Every few seconds each process writes a report into the key-value store of jax's coordination service. Process 0 reads
all reports and writes a verdict, for which the others wait. Files in the run's folder would need a file system that
shows every host the same at once; the store needs jax's port alone. It ends with process 0: when that is killed, jax
aborts the others at the same moment as the watchdog, and either message may come first.
"""

import contextlib
import dataclasses
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
from ladder_jax.processes.options import Patience
from ladder_jax.processes.verdict import End, Members, Report, Verdict

GO_ON = "all processes stop; the same command on each goes on from the last checkpoint"
REPORTS, VERDICTS = "ladder_jax/reports", "ladder_jax/verdicts"
TICK = 0.2  # seconds between two looks at the reports
SETTLE = 1.0  # seconds after a verdict in which a process may still end with an error of its own
LONGEST = 1e6  # seconds: Python's waits have a limit
FAREWELL = 5.0  # seconds at most in which the others read the verdict, before process 0 and the store end


class Watchdog:
    """client: of jax's coordination service; process: the number of this one; hosts: of all, by number."""

    def __init__(self, client: Any, *, process: int, hosts: list[str], patience: Patience):
        self._client, self._process, self._hosts, self._patience = client, process, hosts, patience
        self._members = Members(hosts, patience=patience, now=time.monotonic())
        self._report, self._lock = Report(), threading.Lock()
        self._verdict: Verdict | None = None
        self._wake, self._published, self._judged, self._ending = (threading.Event() for _ in range(4))
        self._answered = time.monotonic()  # when process 0 last took a report
        loops = self._write, self._judge if process == 0 else self._follow
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name="watchdog", daemon=True) for loop in loops
        ]

    def beat(self, doing: str) -> None:
        """Note progress: all processes note the same in the same order, so that one that is behind shows."""
        with self._lock:
            self._report = dataclasses.replace(self._report, beats=self._report.beats + 1, doing=doing)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs. An error in it ends this process: jax's own end would wait for the others."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        except Stopped:  # all have stopped after the same step
            self._finish()
            raise
        except (UserError, RunFailed) as error:
            self._fail(End.FAILED, f"ended: {error}")
            self._leave(str(error), 2 if isinstance(error, UserError) else error.status)
        except KeyboardInterrupt:
            self._fail(End.FAILED, "was interrupted")
            self._leave("interrupted", 130)
        except Exception as error:
            last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:300]
            self._fail(End.CRASHED, f"crashed: {last}")
            if self._verdict is None or self._process in self._verdict.about:
                traceback.print_exc()
                self._leave(f"{self._members.name(self._process)} crashed: {last}: {GO_ON}", 1)
            self._leave(f"{self._verdict.text}: {GO_ON}", 1)
        self._finish()

    def _fail(self, end: End, how: str) -> None:
        """Report the end. Process 0 then waits for its verdict, as all do after a crash: another may have caused it."""
        self._ending.set()
        self._publish(end=end, how=how)
        if self._process == 0 or end is End.CRASHED:
            self._judged.wait(min(self._patience.lost + 3 * self._patience.beat, LONGEST))

    def _finish(self) -> None:
        """Process 0 waits until the others have finished too."""
        self._publish(end=End.DONE)
        if self._process == 0:
            self._ending.set()
            self._judged.wait()
            if self._verdict is not None:
                self._leave(f"{self._verdict.text}: {GO_ON}", 1)
        for thread in self._threads:
            thread.join(FAREWELL)

    def _publish(self, *, within: float = FAREWELL, **changes: Any) -> None:
        """Write a changed report now; go on without after `within` seconds."""
        with self._lock:
            self._report = dataclasses.replace(self._report, **changes)
            self._published.clear()
        self._wake.set()
        self._published.wait(within)

    def _leave(self, line: str, status: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._end(line, status)

    def _end(self, line: str, status: int) -> None:
        """Say why, and end without jax's farewell. Python's buffers stay: a stuck thread may hold their locks."""
        os.write(2, f"ladder-jax: {one_line(line)}\n".encode())
        if self._process > 0:
            self._publish(left=True, within=SETTLE)
        else:
            self._wait_for_others()
        os._exit(status)

    def _wait_for_others(self) -> None:
        """Process 0's: jax aborts the others when the store ends before them."""
        about = self._verdict.about if self._verdict else ()
        until = time.monotonic() + FAREWELL
        while time.monotonic() < until:
            reports = self._reports().items()
            if all(report.left for process, report in reports if process > 0 and process not in about):
                return time.sleep(SETTLE)  # those that have left are about to end
            time.sleep(TICK)

    def _run(self, loop: Callable[[], None]) -> None:
        """A run that nobody watches over would hang where it should end."""
        try:
            loop()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    def _write(self) -> None:
        """Write reports, in a thread of their own: the call never returns where process 0 stands still."""
        for number in itertools.count(1):
            with self._lock:
                report = self._report
            value = json.dumps({**dataclasses.asdict(report), "number": number})
            try:
                self._client.key_value_set(f"{REPORTS}/{self._process}", value, allow_overwrite=True)
            except jax.errors.JaxRuntimeError:  # process 0 is gone: `_follow` hears it too
                self._published.set()
                return
            self._answered = time.monotonic()
            with self._lock:
                if report is self._report:
                    self._published.set()
                    if report.end is End.DONE or report.left:
                        return
            self._wake.wait(self._patience.beat)
            self._wake.clear()

    def _reports(self) -> dict[int, Report]:
        reports = {}
        for key, value in self._client.key_value_dir_get(f"{REPORTS}/"):
            fields = json.loads(value)
            reports[int(key.rpartition("/")[2])] = Report(**{**fields, "end": fields["end"] and End(fields["end"])})
        return reports

    def _judge(self) -> None:
        """In process 0: read the reports until all are done, or one verdict is given."""
        before = time.monotonic()
        while not self._members.all_done:
            time.sleep(TICK)
            now = time.monotonic()
            for process, report in self._reports().items():
                self._members.update(process, report, now=now)
            stood = now - before
            before = now
            if stood > self._patience.lost:  # the others have ended meanwhile
                verdict = Verdict(f"{self._members.name(0)} stood still for {stood:.0f} s", (0,))
            else:
                verdict = self._members.verdict(now=now)
            if verdict is not None:
                for process in range(1, len(self._hosts)):
                    text = json.dumps(dataclasses.asdict(verdict))
                    self._client.key_value_set(f"{VERDICTS}/{process}", text, allow_overwrite=True)
                return self._over(verdict)
        self._judged.set()

    def _follow(self) -> None:
        """In every other process: wait for the verdict, or for the loss of process 0."""
        leader = self._members.name(0)
        milliseconds = max(1, int(1000 * min(1.0, self._patience.beat)))
        while True:
            try:
                text = self._client.blocking_key_value_get(f"{VERDICTS}/{self._process}", milliseconds)
            except jax.errors.JaxRuntimeError as error:
                if self._report.end is End.DONE:
                    return
                if "DEADLINE_EXCEEDED" not in str(error):  # jax aborts on this at the same moment
                    self._end(f"{leader} is gone: {GO_ON}", 1)
                lost = self._patience.lost
                if time.monotonic() - self._answered > lost:
                    return self._over(Verdict(f"{leader} has not been heard of for {lost:g} s", (0,)))
                continue
            if self._report.end is End.DONE:
                return
            verdict = json.loads(text)
            return self._over(Verdict(verdict["text"], tuple(verdict["about"])))

    def _over(self, verdict: Verdict) -> None:
        """End this process, unless its main thread is about to, with an error of its own."""
        self._verdict = verdict
        self._judged.set()
        if not self._ending.wait(SETTLE):
            self._end(f"{verdict.text}: {GO_ON}", 1)
