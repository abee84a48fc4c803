"""The processes of a run hear from each other: all report to process 0, which tells all how it stands."""

import time
from typing import Protocol

from ladder_jax.processes.link import Gone, Link
from ladder_jax.processes.members import Cause, End, Members, Verdict
from ladder_jax.processes.patience import Patience
from ladder_jax.processes.place import Place


class Team(Protocol):
    """What a process's parent has of the others. `links` are worth waiting for."""

    @property
    def links(self) -> list[Link]: ...

    def tick(self, *, beats: int, doing: str) -> Verdict | None:
        """Report this process's progress, when it is time to, and hear the others."""

    def ended(self, end: End) -> None:
        """Report this process's end."""

    @property
    def over(self) -> bool:
        """Whether nobody needs this process any more, once it has ended."""

    def close(self) -> None: ...


class Hub:
    """Process 0's."""

    def __init__(self, came: dict[int, tuple[str, Link]], *, host: str, place: Place, patience: Patience):
        hosts = [host, *(came[process][0] for process in sorted(came))]
        self._links = {process: link for process, (_, link) in came.items()}
        self._members = Members(hosts, place=place, patience=patience, now=time.monotonic())
        self._patience, self._sent = patience, 0.0
        self._verdict: Verdict | None = None

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    @property
    def over(self) -> bool:
        return self._verdict is not None or self._members.all_ended

    def tick(self, *, beats: int, doing: str) -> Verdict | None:
        now = time.monotonic()
        self._members.heard(0, beats=beats, doing=doing, now=now)
        for process in list(self._links):
            self._hear(process, now=now)
        if now - self._sent > self._patience.beat:
            self._tell(beat=True)
            self._sent = now
        if self._verdict is None and (verdict := self._members.verdict(now=now)):
            self._verdict = verdict
            self._tell(verdict=verdict.text, about=verdict.about)
        return self._verdict

    def ended(self, end: End) -> None:
        self._members.ended(0, end, now=time.monotonic())

    def close(self) -> None:
        for link in self._links.values():
            link.finish()

    def _hear(self, process: int, *, now: float) -> None:
        try:
            messages = self._links[process].read()
        except Gone as gone:
            self._members.ended(process, End(Cause.LOST, f"is gone ({gone})", 1), now=now)
            self._links.pop(process).close()
            return
        for message in messages:
            if "cause" in message:
                end = End(Cause(message["cause"]), message["how"], message["status"])
                self._members.ended(process, end, now=now)
                if end.cause is not Cause.CRASHED:  # which waits to be told of another cause
                    self._links.pop(process).close()
                    return
            else:
                self._members.heard(process, beats=message["beats"], doing=message["doing"], now=now)

    def _tell(self, **message) -> None:
        for process, link in list(self._links.items()):
            try:
                link.send(**message)
            except Gone as gone:
                self._members.ended(process, End(Cause.LOST, f"is gone ({gone})", 1), now=time.monotonic())
                self._links.pop(process).close()


class Spoke:
    """Every other process's."""

    def __init__(self, link: Link, *, hosts: list[str], place: Place, patience: Patience):
        self._link, self._patience = link, patience
        self._first = place.named(0, hosts[0])
        self._heard, self._sent = time.monotonic(), 0.0
        self._verdict: Verdict | None = None
        self._ended = False

    @property
    def links(self) -> list[Link]:
        return [] if self._verdict else [self._link]

    @property
    def over(self) -> bool:
        return True

    def tick(self, *, beats: int, doing: str) -> Verdict | None:
        if self._verdict is not None:
            return self._verdict
        now = time.monotonic()
        try:
            for message in self._link.read():
                self._heard = now
                if "verdict" in message:
                    self._verdict = Verdict(message["verdict"], tuple(message["about"]))
                    return self._verdict
            if not self._ended and now - self._sent > self._patience.beat:
                self._link.send(beats=beats, doing=doing)
                self._sent = now
        except Gone as gone:
            self._verdict = Verdict(f"{self._first} is gone ({gone})", (0,))
        if now - self._heard > self._patience.lost:
            self._verdict = Verdict(f"{self._first} has not been heard of for {self._patience.lost:g} s", (0,))
        return self._verdict

    def ended(self, end: End) -> None:
        self._ended = True
        try:
            self._link.send(cause=int(end.cause), how=end.how, status=end.status)
        except Gone:
            return

    def close(self) -> None:
        self._link.finish()
