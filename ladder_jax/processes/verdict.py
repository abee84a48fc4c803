"""What process 0 knows of every process, and its judgement: whether the run is over, and because of whom."""

import dataclasses
import enum

from ladder_jax.processes.options import Patience


class End(enum.StrEnum):
    """How a process ended, by its own report."""

    FAILED = "failed"  # with a line that says why
    CRASHED = "crashed"  # as those do whose partner in a collective is gone
    DONE = "done"  # finished, or saved after a signal: nothing is wrong


@dataclasses.dataclass(frozen=True)
class Report:
    """What a process writes every few seconds.

    number: of this report; beats: how far it is, `doing` in words; end, how: how it ended, in words that go on from its
    name; left: it needs process 0 no more.
    """

    number: int = 0
    beats: int = 0
    doing: str = "starting"
    end: End | None = None
    how: str = ""
    left: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The run is over, because of these processes."""

    text: str
    about: tuple[int, ...]


@dataclasses.dataclass
class _Seen:
    """The newest report of a process; when it came, when `beats` last grew, and when `end` came."""

    report: Report
    heard: float
    moved: float
    ended: float = 0.0


class Members:
    """All processes of a run, as process 0 sees them. Times are of one monotonic clock, in seconds."""

    def __init__(self, hosts: list[str], *, patience: Patience, now: float):
        self._hosts, self._patience = hosts, patience
        self._seen = [_Seen(Report(), heard=now, moved=now) for _ in hosts]

    def update(self, process: int, report: Report, *, now: float) -> None:
        seen = self._seen[process]
        if report.number == seen.report.number:
            return
        seen.heard = now
        if report.beats != seen.report.beats:
            seen.moved = now
        if report.end and not seen.report.end:
            seen.ended = now
        seen.report = report

    @property
    def all_done(self) -> bool:
        return all(seen.report.end is End.DONE for seen in self._seen)

    def name(self, process: int) -> str:
        return f"process {process} of {len(self._hosts)} (host {self._hosts[process]})"

    def verdict(self, *, now: float) -> Verdict | None:
        """A lost process goes before one that failed, and that before one that crashed: each may cause the next."""
        return self._lost(now) or self._failed() or self._crashed() or self._hanging(now)

    def _live(self) -> dict[int, _Seen]:
        return {process: seen for process, seen in enumerate(self._seen) if not seen.report.end}

    def _ended(self, end: End) -> list[int]:
        """Those that ended so, the first first."""
        ended = [process for process, seen in enumerate(self._seen) if seen.report.end is end]
        return sorted(ended, key=lambda process: self._seen[process].ended)

    def _lost(self, now: float) -> Verdict | None:
        lost, beat = self._patience.lost, self._patience.beat
        silence = {process: now - seen.heard for process, seen in self._live().items()}
        if not silence or max(silence.values()) <= lost:
            return None
        about = tuple(process for process, seconds in silence.items() if seconds > lost - beat)  # hosts behind a switch
        names = [f"{self.name(process)} has not been heard of for {lost:g} s" for process in about]
        return Verdict("; ".join(names), about)

    def _failed(self) -> Verdict | None:
        for process in self._ended(End.FAILED)[:1]:
            return Verdict(f"{self.name(process)} {self._seen[process].report.how}", (process,))
        return None

    def _crashed(self) -> Verdict | None:
        """The first crash is to blame once every other process has shown that it was alive after it."""
        for process in self._ended(End.CRASHED)[:1]:
            if all(seen.heard > self._seen[process].ended for seen in self._live().values()):
                return Verdict(f"{self.name(process)} {self._seen[process].report.how}", (process,))
        return None

    def _hanging(self, now: float) -> Verdict | None:
        live, hang = self._live(), self._patience.hang
        if not live or now - max(seen.moved for seen in live.values()) <= hang:
            return None
        least = min(seen.report.beats for seen in live.values())
        ahead = max(live.values(), key=lambda seen: seen.report.beats).report
        if ahead.beats == least:
            text = f"no process got on for {hang:g} s (all are at: {ahead.doing}); a longer wait is --hang-timeout"
            return Verdict(text, ())
        behind = {process: seen.report for process, seen in live.items() if seen.report.beats == least}
        who = "; ".join(f"{self.name(process)} hangs at: {report.doing}" for process, report in behind.items())
        waited = f"the others have waited for it at: {ahead.doing}, for {hang:g} s (--hang-timeout waits longer)"
        return Verdict(f"{who}; {waited}", tuple(behind))
