"""What process 0 knows of every process, and its judgement: whether the run is over, and because of whom."""

import dataclasses
import enum

from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place

SETTLE = 1.0  # seconds: the end of one process brings others down, and they may be heard first


class Cause(enum.IntEnum):
    """Why a process is no more; of several the smallest is the likeliest to have caused the others."""

    LOST = 0  # killed, or its host is gone
    FAILED = 1  # with a line that says why
    CRASHED = 2  # as those do whose partner in a collective is gone
    DONE = 3  # finished, or saved after a signal: nothing is wrong


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended: `how` goes on from its name, "was killed by SIGKILL"."""

    cause: Cause
    how: str
    status: int


@dataclasses.dataclass
class Member:
    """heard: when it gave a sign of life; beats, doing: how far it says that it is, and since when (`moved`)."""

    host: str
    heard: float
    moved: float
    beats: int = 0
    doing: str = "starting"
    end: End | None = None
    ended: float = 0.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The run is over, because of these processes."""

    text: str
    about: tuple[int, ...]


class Members:
    """All processes of a run, as process 0 sees them. Times are of one monotonic clock, in seconds."""

    def __init__(self, hosts: list[str], *, place: Place, patience: Patience, now: float):
        self._members = [Member(host, heard=now, moved=now) for host in hosts]
        self._place, self._patience = place, patience

    def heard(self, process: int, *, beats: int, doing: str, now: float) -> None:
        member = self._members[process]
        member.heard = now
        if beats != member.beats:
            member.beats, member.doing, member.moved = beats, doing, now

    def ended(self, process: int, end: End, *, now: float) -> None:
        """The first end counts: a connection is closed after it as well."""
        member = self._members[process]
        if member.end is None:
            member.end, member.ended = end, now

    @property
    def all_ended(self) -> bool:
        return all(member.end for member in self._members)

    def verdict(self, *, now: float) -> Verdict | None:
        for process, member in enumerate(self._members):
            if member.end is None and now - member.heard > self._patience.lost:
                how = f"has not been heard of for {self._patience.lost:g} s"
                self.ended(process, End(Cause.LOST, how, 1), now=now - SETTLE)
        bad = {i: m for i, m in enumerate(self._members) if m.end and m.end.cause is not Cause.DONE}
        if bad:
            return self._blame(bad, now=now)
        return self._hang(now=now)

    def _blame(self, bad: dict[int, Member], *, now: float) -> Verdict | None:
        if now - min(member.ended for member in bad.values()) < SETTLE and not self.all_ended:
            return None
        worst = min(member.end.cause for member in bad.values())
        blamed = {i: m for i, m in bad.items() if m.end.cause is worst}
        if worst is not Cause.LOST:  # of those who failed, the first
            first = min(blamed, key=lambda i: blamed[i].ended)
            blamed = {first: blamed[first]}
        return Verdict("; ".join(f"{self._name(i)} {m.end.how}" for i, m in blamed.items()), tuple(blamed))

    def _hang(self, *, now: float) -> Verdict | None:
        live = {i: m for i, m in enumerate(self._members) if m.end is None}
        hang = self._patience.hang
        if not live or now - max(member.moved for member in live.values()) <= hang:
            return None
        least, most = min(m.beats for m in live.values()), max(m.beats for m in live.values())
        behind = {i: m for i, m in live.items() if m.beats == least}
        if least == most:
            doing = next(iter(live.values())).doing
            text = f"no process got on for {hang:g} s (all are at: {doing}); a longer wait is --hang-timeout"
            return Verdict(text, ())
        ahead = next(m.doing for m in live.values() if m.beats == most)
        who = "; ".join(f"{self._name(i)} hangs at: {m.doing}" for i, m in behind.items())
        text = f"{who}; the others have waited for it at: {ahead}, for {hang:g} s (--hang-timeout waits longer)"
        return Verdict(text, tuple(behind))

    def _name(self, process: int) -> str:
        return self._place.named(process, self._members[process].host)
