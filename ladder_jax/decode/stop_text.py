"""Where a text ends that comes in pieces: at a stop string. Imports no jax."""

import codecs
from collections.abc import Sequence


class StopText:
    """Turns bytes into text that may be shown: whole UTF-8 characters, and no beginning of a stop string.

    The text does not depend on how the bytes were cut. Invalid UTF-8 becomes replacement characters. Of several stop
    strings, the first to be complete ends the text; of those complete at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()):
        self._matches = [_Match(one) for one in stop]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        """The text that may be shown after these bytes."""
        return self._release(self._utf8.decode(data))

    def flush(self) -> str:
        """The text that was held back, as no more bytes will come."""
        shown = self._release(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        if (stop := self._search(text)) is not None:
            shown, self._held, self.stopped = text[:stop], "", True
            return shown
        keep = max((match.length for match in self._matches), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def _search(self, text: str) -> int | None:
        """Where the stop string begins that ends `text`, of which the held part was searched before."""
        if not self._matches:
            return None
        for end in range(len(self._held), len(text)):
            for match in self._matches:
                match.push(text[end])
            if longest := max(len(match.stop) * match.complete for match in self._matches):
                return end + 1 - longest
        return None


class _Match:
    """How much of one stop string a growing text ends with: the search of Knuth, Morris and Pratt.

    Its work grows with the text alone: the table of a long stop string is made as far as the text has followed it.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.length = 0  # characters of `stop`, from its first, at the text's end
        self._shorter = [0]  # by length: the next shorter one that the text then also ends with

    @property
    def complete(self) -> bool:
        return self.length == len(self.stop)

    def push(self, char: str) -> None:
        """`char` is the text's next. Not to be called once `complete`."""
        self.length = self._longer(self.length, char)
        if self.length == len(self._shorter):
            self._shorter.append(self._longer(self._shorter[-1], char) if self.length > 1 else 0)

    def _longer(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._shorter[length]
        return length + (self.stop[length] == char)
