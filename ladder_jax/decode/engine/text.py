"""Text as it may be shown: whole UTF-8 characters, and nothing that may become a stop string."""

import codecs
from collections.abc import Sequence


class Text:
    """Bytes in, text out; what comes out, joined, does not depend on how the bytes were cut.

    Invalid UTF-8 becomes replacement characters. Of several stop strings, the one that is complete
    first ends the text; of those complete at once, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self._stop = tuple(stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """What may be shown, now that these bytes have come."""
        return self._release(self._utf8.decode(data))

    def flush(self) -> str:
        """What was held back, now that no more will come."""
        shown = self._release(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held, self.stopped = self._held[: min(found)[1]], "", True
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
