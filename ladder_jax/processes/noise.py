"""What native code prints in a worker: passed on, but for the pages that bury the one line about a lost process.

When a process is lost, the others' C++ threads log errors, then an abort with its stack. Those are held back until the
parent knows whether another process was the cause.
"""

import re

# glog's: severity, month and day, time, thread, file. These files log nothing but the trouble of other processes.
_TROUBLE = re.compile(
    r"^([WE]\d{4} .*(coordination_service|preemption_sync|preemption_notifier|grpc|/distributed/)|F\d{4} )"
)
_LOGGED = re.compile(r"^[IWEF]\d{4} ")
_DROPPED = re.compile(r"^\[Gloo\] Rank \d+ is connected")


class Noise:
    """`held` is what `passed` has kept back. After a fatal error all is kept."""

    def __init__(self):
        self.held = ""
        self._rest, self._holding, self._fatal = "", False, False

    def passed(self, text: str, *, end: bool = False) -> str:
        """Of `text`, which comes in pieces, what is to be printed now."""
        *lines, self._rest = (self._rest + text).split("\n")
        if end and self._rest:
            lines, self._rest = [*lines, self._rest], ""
        shown = []
        for line in lines:
            self._fatal |= line.startswith("F") and bool(_LOGGED.match(line))
            if _LOGGED.match(line):  # the lines after one belong to it
                self._holding = bool(_TROUBLE.match(line))
            if self._fatal or self._holding:
                self.held += line + "\n"
            elif not _DROPPED.match(line):
                shown.append(line + "\n")
        return "".join(shown)
