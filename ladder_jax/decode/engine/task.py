"""A request on its way: its tokens and text on the host. Imports no jax."""

from collections.abc import Callable, Sequence

from ladder_jax.decode.engine.handle import Handle
from ladder_jax.decode.engine.request import Finish, NoNumbers, Piece, Result
from ladder_jax.decode.engine.text import Text

Decoder = Callable[[Sequence[int]], bytes]
"""The bytes of tokens; those of a sequence are its tokens' bytes, joined."""


class Task:
    """Takes tokens as the device makes them, finds where the request ends, and hands on what may be seen."""

    def __init__(self, handle: Handle, *, decoder: Decoder | None):
        self.handle = handle
        self.request = handle.request
        self.cancelled = False
        self._decoder = decoder
        self._text = Text(self.request.stop)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._shown: list[str] = []
        self._given = (0, 0)  # how many tokens, and parts of the text, the handle has

    def take(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> Finish | None:
        """The next tokens; says why the request ends where it does. What was made after its end is dropped.

        logprobs: needed of a request that asks for them. Raises NoNumbers where there is no next token.
        """
        reason = None
        for index, token in enumerate(tokens):
            if token < 0:
                self._give()
                raise NoNumbers(len(self._tokens))
            self._tokens.append(int(token))
            if self.request.logprobs:
                self._logprobs.append(float(logprobs[index]))
            reason = self._read(int(token))
            if reason:
                break
        if not reason:  # else `finish` gives it, with the text that was held back
            self._give()
        return reason

    def finish(self, reason: Finish) -> int:
        """Ends the request; returns how many tokens it has."""
        if self._decoder:
            self._shown.append(self._text.flush())
        self._give()
        logprobs = tuple(self._logprobs) if self.request.logprobs else None
        text = "".join(self._shown) if self._decoder else None
        self.handle.end(Result(tuple(self._tokens), text, logprobs, reason, len(self.request.prompt)))
        return len(self._tokens)

    def _read(self, token: int) -> Finish | None:
        if token in self.request.stop_ids:
            return Finish.STOP
        if self._decoder:
            self._shown.append(self._text.push(self._decoder([token])))
        if self._text.stopped:
            return Finish.STOP
        return Finish.LENGTH if len(self._tokens) == self.request.max_new_tokens else None

    def _give(self) -> None:
        tokens, parts = self._given
        text = "".join(self._shown[parts:]) if self._decoder else None
        if self._tokens[tokens:] or text:
            logprobs = tuple(self._logprobs[tokens:]) if self.request.logprobs else None
            self.handle.give(Piece(tuple(self._tokens[tokens:]), text, logprobs))
        self._given = (len(self._tokens), len(self._shown))
